// What the kernels take for granted, checked: the first thing that is wrong is told.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "flash_attn_ck.h"

namespace flash_attn_ck {

using Shape  = flash_attn_ck_shape;
using Tensor = flash_attn_ck_tensor;

class Checker
{
  public:
    explicit Checker(flash_attn_ck_plan& plan) : plan_(plan) {}

    // The first thing that is wrong, told as printf would; later ones are not looked at.
    __attribute__((format(printf, 4, 5))) void require(bool right, int status, const char* format, ...)
    {
        if(right || status_ != FLASH_ATTN_CK_OK)
            return;
        status_ = status;
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(plan_.message, sizeof(plan_.message), format, arguments);
        va_end(arguments);
    }

    bool ok() const { return status_ == FLASH_ATTN_CK_OK; }
    int status() const { return status_; }

    // Strides as ck_tile takes them, and offsets within one sequence and head as its buffer instructions do.
    void tensor(const char* name, const Tensor& tensor, int64_t rows, const Shape& shape, bool batched)
    {
        constexpr int64_t kLimit = INT64_C(1) << 31;
        const auto address       = reinterpret_cast<uintptr_t>(tensor.data);
        require(address != 0, FLASH_ATTN_CK_INVALID, "%s: is NULL", name);
        require(address % FLASH_ATTN_CK_ALIGNMENT_BYTES == 0, FLASH_ATTN_CK_INVALID, "%s: its address is not a multiple of %d bytes",
                name, FLASH_ATTN_CK_ALIGNMENT_BYTES);
        const struct
        {
            const char* name;
            int64_t value;
        } strides[] = {{"batch", batched ? tensor.batch : 0}, {"row", tensor.row}, {"head", tensor.head}};
        for(const auto& stride : strides)
        {
            require(stride.value >= 0 && stride.value % 8 == 0, FLASH_ATTN_CK_INVALID,
                    "%s: its %s stride is %lld elements, not a multiple of 8", name, stride.name, (long long)stride.value);
            require(stride.value < kLimit, FLASH_ATTN_CK_UNSUPPORTED, "%s: its %s stride of %lld elements is 2^31 or more", name,
                    stride.name, (long long)stride.value);
        }
        if(!ok())
            return;
        const int64_t extent = ((rows > 0 ? rows - 1 : 0) * tensor.row + shape.head_dim) * 2;
        require(extent < kLimit, FLASH_ATTN_CK_UNSUPPORTED, "%s: one sequence of a head spans %lld bytes, 2^31 or more", name,
                (long long)extent);
    }

    void shape(const Shape& s, bool exact_dim)
    {
        require(s.dtype == FLASH_ATTN_CK_FP16 || s.dtype == FLASH_ATTN_CK_BF16, FLASH_ATTN_CK_INVALID,
                "dtype: %d is neither 0 (fp16) nor 1 (bf16)", s.dtype);
        require(s.batch > 0, FLASH_ATTN_CK_INVALID, "batch: %d is not above 0", s.batch);
        require(s.batch < 65536, FLASH_ATTN_CK_UNSUPPORTED, "batch: %d is above 65535, the most a grid takes", s.batch);
        require(s.nheads > 0, FLASH_ATTN_CK_INVALID, "nheads: %d is not above 0", s.nheads);
        require(s.nheads < 65536, FLASH_ATTN_CK_UNSUPPORTED, "nheads: %d is above 65535, the most a grid takes", s.nheads);
        require(s.nheads_k > 0 && s.nheads % (s.nheads_k > 0 ? s.nheads_k : 1) == 0, FLASH_ATTN_CK_INVALID,
                "nheads_k: %d does not divide nheads = %d", s.nheads_k, s.nheads);
        require(s.seqlen_q > 0, FLASH_ATTN_CK_INVALID, "seqlen_q: %d is not above 0", s.seqlen_q);
        require(s.seqlen_q <= 64 * 65535, FLASH_ATTN_CK_UNSUPPORTED, "seqlen_q: %d is above %d, the most a grid takes", s.seqlen_q,
                64 * 65535);
        require(s.seqlen_k > 0, FLASH_ATTN_CK_INVALID, "seqlen_k: %d is not above 0", s.seqlen_k);
        if(exact_dim)
            require(s.head_dim == 32 || s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256,
                    s.head_dim > 0 && s.head_dim < 256 ? FLASH_ATTN_CK_UNSUPPORTED : FLASH_ATTN_CK_INVALID,
                    "head_dim: %d is none of 32, 64, 128, 256: pad to the next", s.head_dim);
        require(s.head_dim > 0 && s.head_dim <= 256 && s.head_dim % 8 == 0, FLASH_ATTN_CK_INVALID,
                "head_dim: %d is not a multiple of 8 from 8 to 256", s.head_dim);
        require(s.window_left >= -1, FLASH_ATTN_CK_INVALID, "window_left: %d is below -1", s.window_left);
        require(s.window_right >= -1, FLASH_ATTN_CK_INVALID, "window_right: %d is below -1", s.window_right);
        require(std::isfinite(s.scale), FLASH_ATTN_CK_INVALID, "scale: %g is not finite", s.scale);
        require(s.scale > 0, FLASH_ATTN_CK_UNSUPPORTED, "scale: %g is not above 0", s.scale);
        require(s.softcap >= 0 && std::isfinite(s.softcap), FLASH_ATTN_CK_INVALID, "softcap: %g is below 0 or not finite", s.softcap);
        require(s.dropout_p >= 0 && s.dropout_p < 1, FLASH_ATTN_CK_INVALID, "dropout_p: %g is not from 0 to below 1", s.dropout_p);
        require(s.dropout_p == 0 || s.rng_state != nullptr, FLASH_ATTN_CK_INVALID, "rng_state: is NULL, with dropout_p = %g",
                s.dropout_p);
        require(s.softcap == 0 || s.alibi_slopes == nullptr, FLASH_ATTN_CK_UNSUPPORTED, "softcap: not together with alibi_slopes");
        require(s.alibi_slopes == nullptr || (s.seqlen_q < 65536 && s.seqlen_k < 65536), FLASH_ATTN_CK_UNSUPPORTED,
                "alibi_slopes: distances of 65536 and more do not fit the 16 bits of the kernels");
        require(s.softcap == 0 || s.dropout_p == 0, FLASH_ATTN_CK_UNSUPPORTED, "softcap: not together with dropout_p");
        const struct
        {
            const char* name;
            int64_t value;
        } strides[] = {{"lse_batch", s.lse_batch}, {"lse_head", s.lse_head}, {"alibi_batch", s.alibi_batch}};
        for(const auto& stride : strides)
            require(stride.value >= 0 && stride.value <= INT32_MAX, FLASH_ATTN_CK_UNSUPPORTED, "%s: %lld is not from 0 to 2^31 - 1",
                    stride.name, (long long)stride.value);
    }

    void rows(int64_t total_q)
    {
        require(total_q >= 0 && total_q <= INT32_MAX, FLASH_ATTN_CK_INVALID, "total_q: %lld is not from 0 to 2^31 - 1",
                (long long)total_q);
    }

    void pointer(const char* name, const void* pointer) { require(pointer != nullptr, FLASH_ATTN_CK_INVALID, "%s: is NULL", name); }

  private:
    flash_attn_ck_plan& plan_;
    int status_ = FLASH_ATTN_CK_OK;
};

} // namespace flash_attn_ck
