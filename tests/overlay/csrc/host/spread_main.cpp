// Numbers blocks and bytes: writes the shared memory of such a grid's blocks, as int.
#include "launch_decode.cuh"
#include "tensors.h"

using host::whole;

int main(int count, char** arguments) {
    host::take_numbers(count, arguments);
    const int bytes = exl3::spread_bytes(whole("bytes"), dim3(whole("blocks")));
    host::give(&bytes, sizeof bytes);
    return 0;
}
