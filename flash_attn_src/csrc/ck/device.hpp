// What a generated unit includes: the kernels, and one macro that gives an instance its entry point.
#pragma once

#include "kernels.hpp"

using namespace flash_attn_ck;
using fp16 = ck_tile::half_t;
using bf16 = ck_tile::bf16_t;

// FLASH_ATTN_CK_ENTRY(symbol, kernel type); the type may hold commas.
#define FLASH_ATTN_CK_ENTRY(symbol, ...)                                                                               \
    using symbol##_kernel = __VA_ARGS__;                                                                               \
    extern "C" __global__ void __launch_bounds__(symbol##_kernel::kBlockSize, symbol##_kernel::kBlockPerCu)            \
        symbol(symbol##_kernel::Kargs arguments)                                                                       \
    {                                                                                                                  \
        symbol##_kernel{}(arguments);                                                                                  \
    }
