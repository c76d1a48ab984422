/* flash_attn_ck: plans the launches of the Composable Kernel attention kernels. Version 1 of the interface.
 *
 * A plan is a list of launches: the kernel's name in the store (its entry point is "ck_" and the name, '-' as '_'),
 * the grid and block, and the bytes of its one argument, which a driver takes by value:
 *
 *     flash_attn_ck_plan plan;
 *     if (flash_attn_ck_plan_forward(&forward, &plan) != FLASH_ATTN_CK_OK) { puts(plan.message); ... }
 *     for (uint32_t i = 0; i < plan.count; i++) {
 *         void *arguments[] = {plan.launches[i].arguments};
 *         hipModuleLaunchKernel(function_of(plan.launches[i].kernel), grid..., block, 1, 1, 0, stream, arguments, NULL);
 *     }
 *
 * The library calls no driver, allocates nothing, keeps no state and may be used by any number of threads. Pointers
 * are device addresses; it never reads what is behind them. Shapes are in elements, strides too; the head dim is
 * contiguous. Every structure is zeroed by the caller first: 0 or NULL is an option that is not used.
 */
#ifndef FLASH_ATTN_CK_H
#define FLASH_ATTN_CK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FLASH_ATTN_CK_API __attribute__((visibility("default")))
#else
#define FLASH_ATTN_CK_API
#endif

enum {
    FLASH_ATTN_CK_VERSION         = 1,
    FLASH_ATTN_CK_MAX_LAUNCHES    = 3,
    FLASH_ATTN_CK_MAX_NAME        = 64,
    FLASH_ATTN_CK_MAX_ARGUMENTS   = 384, /* bytes */
    FLASH_ATTN_CK_MAX_MESSAGE     = 256,
    FLASH_ATTN_CK_MAX_SPLITS      = 128,
    FLASH_ATTN_CK_ALIGNMENT_BYTES = 16 /* of q, k, v, out and their gradients, and of their strides */
};

enum flash_attn_ck_status {
    FLASH_ATTN_CK_OK          = 0,
    FLASH_ATTN_CK_INVALID     = 1, /* the arguments contradict each other or what is said here */
    FLASH_ATTN_CK_UNSUPPORTED = 2  /* a sound call, for which Composable Kernel has no kernel */
};

enum flash_attn_ck_dtype { FLASH_ATTN_CK_FP16 = 0, FLASH_ATTN_CK_BF16 = 1 };

/* A tensor (batch, rows, heads, head_dim) by its strides; (rows, heads, head_dim) with batch 0 where sequences of
 * several lengths lie end to end, or pages (pages, rows of a page, heads, head_dim). */
typedef struct flash_attn_ck_tensor {
    void *data;
    int64_t batch, row, head;
} flash_attn_ck_tensor;

/* What all three calls have. */
typedef struct flash_attn_ck_shape {
    int32_t dtype;                /* enum flash_attn_ck_dtype */
    int32_t batch;                /* sequences */
    int32_t nheads, nheads_k;     /* nheads is a multiple of nheads_k */
    int32_t head_dim;             /* forward: a multiple of 8 up to 256; else 32, 64, 128 or 256 */
    int32_t seqlen_q, seqlen_k;   /* the longest where lengths differ; seqlen_k the room of a cache */
    int32_t window_left;          /* query i sees keys i + seqlen_k - seqlen_q - left to ... + right; -1 is open */
    int32_t window_right;         /* 0 for causal */
    float scale;                  /* of the scores, above 0 */
    float softcap;                /* scores become softcap * tanh(score / softcap) */
    float dropout_p;              /* from 0 to below 1 */
    int64_t lse_batch, lse_head;  /* strides of lse and delta: fp32 (batch, nheads, seqlen_q), or (nheads, total_q) */
    int64_t alibi_batch;          /* stride of alibi_slopes, 0 where they serve every batch entry */
    const float *alibi_slopes;    /* (batch, nheads) or (nheads) */
    const int32_t *cu_seqlens_q;  /* (batch + 1): where each sequence starts; NULL where all lengths are the same */
    const int32_t *cu_seqlens_k;
    const uint64_t *rng_state;    /* with dropout: seed and offset of Philox, on the device */
} flash_attn_ck_shape;

typedef struct flash_attn_ck_forward {
    flash_attn_ck_shape shape;
    flash_attn_ck_tensor q, k, v, out;
    float *lse;                   /* log-sum-exp of the scores; +inf in a row that sees no key */
    const int32_t *seqused_k;     /* (batch): keys that count, with cu_seqlens only */
    uint8_t *random;              /* with dropout, (batch, nheads, seqlen_q, seqlen_k): below or at 255 * (1 - p), */
    int64_t random_batch;         /* rounded down, where kept; with cu_seqlens (nheads, total_q, seqlen_k) */
    int64_t random_head, random_row;
} flash_attn_ck_forward;

typedef struct flash_attn_ck_backward {
    flash_attn_ck_shape shape;
    flash_attn_ck_tensor q, k, v, out, dout, dq;
    flash_attn_ck_tensor dk, dv;  /* of nheads heads: with fewer in k and v the caller sums up those of a group */
    const float *lse;
    float *delta;                 /* result, rowsum(out * dout); strides of lse */
    float *dq_sum;                /* workspace, zeroed: flash_attn_ck_backward_workspace() bytes */
    int64_t total_q;              /* rows of q, with cu_seqlens only */
    int32_t deterministic;        /* the same bits every time, for a workspace as often as there are blocks of keys */
    int32_t reserved;
} flash_attn_ck_backward;

/* Attention of a few queries over a cache: new keys and values are appended, the keys split among blocks. With
 * block_table and cu_seqlens_q and _k it also serves longer queries over pages. */
typedef struct flash_attn_ck_decode {
    flash_attn_ck_shape shape;
    flash_attn_ck_tensor q, k, v, out;
    flash_attn_ck_tensor k_new, v_new; /* NULL data: nothing to append */
    float *lse;
    const int32_t *seqlens_before;     /* (batch): keys in the cache before k_new */
    const int32_t *seqlens_k;          /* (batch): keys to see, k_new among them; NULL: seqlen_k of them */
    const int32_t *cache_batch_idx;    /* (batch): row of the cache of a sequence; not with block_table */
    const int32_t *block_table;        /* (batch, pages of the longest sequence) */
    int64_t block_table_batch;
    int64_t total_q;                   /* rows of q, with cu_seqlens_q only */
    const void *rotary_cos, *rotary_sin; /* (places, rotary_dim / 2), dtype as q; q is turned in place */
    int32_t rotary_dim, rotary_interleaved;
    int32_t seqlen_new, page_size;
    int32_t num_splits;                /* 1 to FLASH_ATTN_CK_MAX_SPLITS */
    int32_t reserved;
    float *split_out, *split_lse;      /* workspaces in fp32: num_splits times the elements of out, of lse */
} flash_attn_ck_decode;

typedef struct flash_attn_ck_launch {
    char kernel[FLASH_ATTN_CK_MAX_NAME];
    uint32_t grid[3];
    uint32_t block;
    uint32_t argument_bytes;
    uint32_t reserved;
    unsigned char arguments[FLASH_ATTN_CK_MAX_ARGUMENTS];
} flash_attn_ck_launch;

typedef struct flash_attn_ck_plan {
    char message[FLASH_ATTN_CK_MAX_MESSAGE]; /* what is wrong, beginning with the parameter's name; "" where nothing is */
    uint32_t count;
    uint32_t reserved;
    flash_attn_ck_launch launches[FLASH_ATTN_CK_MAX_LAUNCHES];
} flash_attn_ck_plan;

FLASH_ATTN_CK_API int flash_attn_ck_version(void);

/* One launch. */
FLASH_ATTN_CK_API int flash_attn_ck_plan_forward(const flash_attn_ck_forward *, flash_attn_ck_plan *);

/* Three launches: delta; dk, dv and the sums of dq; dq. */
FLASH_ATTN_CK_API int flash_attn_ck_plan_backward(const flash_attn_ck_backward *, flash_attn_ck_plan *);

/* Two or three launches: the append where there is k_new, the splits, their sum. */
FLASH_ATTN_CK_API int flash_attn_ck_plan_decode(const flash_attn_ck_decode *, flash_attn_ck_plan *);

/* Bytes of dq_sum, from the shape, total_q and deterministic; 0 where they are not valid. */
FLASH_ATTN_CK_API int64_t flash_attn_ck_backward_workspace(const flash_attn_ck_backward *);

/* The name of the kernel number `index` that a plan may hold, NULL from the last on; its argument bytes. */
FLASH_ATTN_CK_API const char *flash_attn_ck_kernel(uint32_t index, uint32_t *argument_bytes);

#ifdef __cplusplus
}
#endif
#endif
