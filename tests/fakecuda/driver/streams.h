// The stream that a handle stands for.
#pragma once
#include "driver.h"

// CUDA_SUCCESS, and the stream; or why work cannot be queued there. Default streams are those of `current`.
CUresult usable_stream(CUstream handle, Context &current, StreamP *stream);
// The same for calls that work may not be queued by.
CUresult any_stream(CUstream handle, Context &current, StreamP *stream);
