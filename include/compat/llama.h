#include "../kvstate_llama.h"
