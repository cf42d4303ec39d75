// What a header of kernel arguments needs of the CUDA runtime.
#pragma once

using cudaStream_t = void*;
