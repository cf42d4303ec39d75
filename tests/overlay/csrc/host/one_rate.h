// Included first: a dispatcher names the instances of every rate, of which a program has one.
#pragma once

#include "api.h"
#include "codec.cuh"

namespace exl3 {

template <int K, Codebook C>
[[gnu::weak]] int gate_up_instance(const MoeArguments&, cudaStream_t);
template <int K, Codebook C>
[[gnu::weak]] int down_instance(const MoeArguments&, cudaStream_t);
template <int K, Codebook C>
[[gnu::weak]] int linear_instance(const LinearArguments&, cudaStream_t);
template <int K, Codebook C>
[[gnu::weak]] int parts_instance(const LinearPartsArguments&, cudaStream_t);

}  // namespace exl3
