// Catches the program when it touches device memory itself.
#pragma once

// From now on such an access ends the process with a message that says what was touched.
void watch_host_accesses();
