/* Flash attention on AMD GPUs: forward and backward, for programs in C and other languages.
 *
 *     flash_attn_rocm *gpu;
 *     flash_attn_rocm_open("gfx942.zip", 0, &gpu);
 *     flash_attn_rocm_forward_scratch(gpu, &call, &bytes);          ask for scratch memory, allocate it
 *     flash_attn_rocm_forward(gpu, &call, scratch, bytes, stream);  launch on a hipStream_t; nothing waits
 *
 * Neither this header nor the library needs HIP's headers: the library opens libamdhip64.so when it is first used. A
 * function returns FLASH_ATTN_ROCM_OK or the kind of an error, and flash_attn_rocm_error() then has the message, which
 * names the wrong value and a remedy. A call that returns an error because of its arguments has launched nothing. All
 * functions may be called by several threads at once.
 */
#ifndef FLASH_ATTN_ROCM_H
#define FLASH_ATTN_ROCM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The interface's number. It grows with each release that adds a function, or a field at the end of a struct. */
#define FLASH_ATTN_ROCM_INTERFACE 2

/* Structs that begin with struct_size grow at their end, and zero always means what a field's absence means. A program
 * sets struct_size to the sizeof of its own header, and fills what it does not use with zeros. So a program that was
 * compiled with an older header runs with a newer library. A program that was compiled with a newer header runs with an
 * older library too, as long as the fields that the library does not know are zero; otherwise the call is refused. The
 * other structs never change. */

enum {
    FLASH_ATTN_ROCM_OK = 0,
    FLASH_ATTN_ROCM_ARGUMENT = 1,       /* an argument that is invalid on every GPU */
    FLASH_ATTN_ROCM_UNSUPPORTED = 2,    /* a valid call for which there are no kernels on any GPU */
    FLASH_ATTN_ROCM_MISSING_KERNEL = 3, /* a kernel that this store lacks */
    FLASH_ATTN_ROCM_STORE = 4,          /* a kernel store that is missing, damaged, or of another release */
    FLASH_ATTN_ROCM_OUT_OF_MEMORY = 5,
    FLASH_ATTN_ROCM_WRONG_DEVICE = 6, /* a GPU number that does not exist */
    FLASH_ATTN_ROCM_DRIVER = 7,       /* a HIP runtime that is missing, or that refused a call */
    FLASH_ATTN_ROCM_INTERNAL = 8      /* a defect of this library: please report the message */
};

enum { FLASH_ATTN_ROCM_FP16 = 0, FLASH_ATTN_ROCM_BF16 = 1, FLASH_ATTN_ROCM_FP32 = 2 };

/* Elements of a tensor where they differ from the type in which a call computes. Q8_0 is llama.cpp's: 32 numbers of 8 bits
 * behind a scale in fp16. Forwards take k and v in FP8 beside q and out in fp16 or bf16, and q in FP8 too where dtype is
 * bf16. Any other tensor that is stored otherwise than the call's type is refused by name. */
enum {
    FLASH_ATTN_ROCM_STORED_FP16 = 1,
    FLASH_ATTN_ROCM_STORED_BF16 = 2,
    FLASH_ATTN_ROCM_STORED_FP32 = 3,
    FLASH_ATTN_ROCM_STORED_FP8 = 4, /* the FP8 format of the GPU's matrix units */
    FLASH_ATTN_ROCM_STORED_Q8_0 = 5
};

/* In which numbers a forward of whole sequences computes its products; 0: in those of its tensors. INT8: products of queries
 * and keys, with a scale for a block of rows; dense rows in fp16 or bf16, head_dim a multiple of 16 up to 128, causal and
 * windows, on RDNA 3 and 4. FP8: all products, with a scale for each sequence and head; head_dim a multiple of 16 up to 256,
 * strides that are multiples of 16 elements, softcap, ALiBi and dropout, on GPUs with FP8. */
enum { FLASH_ATTN_ROCM_COMPUTE_INT8 = 1, FLASH_ATTN_ROCM_COMPUTE_FP8 = 2 };

/* A tensor in GPU memory, of shape (batch, rows, heads, head_dim), or (rows, heads, head_dim) with batch_stride 0. Strides
 * are in elements; the head dim is dense. Address and strides are multiples of 16 bytes. */
typedef struct {
    void *data;
    int64_t batch_stride; /* from one sequence to the next; of keys and values in pages: from one page to the next */
    int64_t row_stride;
    int64_t head_stride;
    int32_t stored;   /* FLASH_ATTN_ROCM_STORED_..., how its elements lie in memory; 0: as shape.dtype says */
    int32_t reserved; /* 0 */
} flash_attn_rocm_tensor;

/* Sizes, scale and mask of a forward and its backward. */
typedef struct {
    int32_t dtype;   /* FLASH_ATTN_ROCM_FP16, _BF16 or _FP32: elements of q, k, v, out and their gradients */
    int32_t causal;  /* 1: each query sees the keys up to its own position, where the last query sees the last key */
    int64_t batch;   /* sequences */
    int64_t heads;   /* of q, a multiple of heads_k */
    int64_t heads_k; /* of k and v */
    int64_t head_dim; /* of q and k: a multiple of 8 up to 512 */
    int64_t head_dim_v; /* of v and out; 0: head_dim */
    int64_t seqlen_q; /* queries of the longest sequence */
    int64_t seqlen_k; /* keys of the longest sequence */
    int64_t total_q;  /* rows of q in all, with cu_seqlens_q; else 0 */
    int64_t total_k;  /* rows of k in all, with cu_seqlens_k; else 0 */
    float softmax_scale; /* factor of the scores, commonly 1 / sqrt(head_dim) */
    int32_t reserved;    /* 0 */
    int64_t window_left;  /* keys that a query sees before its position; -1: all */
    int64_t window_right; /* keys that a query sees after its position; -1: all */
    const int32_t *cu_seqlens_q;   /* GPU memory, int32 (batch + 1): where each sequence of packed rows starts; or NULL */
    const int32_t *cu_seqlens_k;   /* as cu_seqlens_q, for keys; the same address if each sequence has as many keys */
} flash_attn_rocm_shape;

/* What a call may have besides. Zero is no option. A forward and its backward take the same options; what is for forwards
 * alone is refused by a backward. An option that no kernel honours beside another one is refused by its name. */
typedef struct {
    size_t struct_size;  /* sizeof(flash_attn_rocm_options) */
    float softcap;       /* scores become softcap * tanh(score / softcap); 0: none */
    float host_cost;     /* microseconds that this program needs for a second launch in a call: the keys of a forward are
                            split where the GPU saves more; 0: 2 */
    const float *alibi_slopes;   /* GPU memory, fp32 (heads) or (batch, heads) */
    int64_t alibi_batch_stride;  /* elements from one sequence's slopes to the next; 0: all sequences share (heads) */
    const void *sinks;     /* GPU memory, (heads): a score of each head that joins the sum and has no value. A backward finds
                              them in lse */
    int32_t sinks_stored;  /* FLASH_ATTN_ROCM_STORED_FP32; 0: as shape.dtype says */
    int32_t bias_stored;   /* as sinks_stored */
    const void *bias;      /* GPU memory, (batch, heads, seqlen_q, seqlen_k), added to the scores after softcap; -inf hides a
                              key. A mask of zeros and -inf is such a bias. Dense rows only */
    int64_t bias_batch_stride; /* elements; 0: all sequences share it */
    int64_t bias_head_stride;  /* 0: all heads share it */
    int64_t bias_row_stride;   /* from one query to the next; keys are dense. -1: a table of distances, (batch, heads,
                                  seqlen_q + seqlen_k - 1), and `bias` is the address of its entry seqlen_q - 1 */
    float dropout;         /* probability of dropping a weight */
    int32_t second_query;  /* 1, for forwards alone: a row of q is a row of a second query, head_dim_v wide, for which the
                              values are keys too, and behind it the head_dim columns of the query. So multi-head latent
                              attention reads its cache once: head_dim_v 512, head_dim up to 64 */
    const int64_t *rng_state; /* GPU memory, (2): seed and offset of the random numbers; a backward takes its forward's */

    /* Forwards alone: */
    const int32_t *leftpad_k; /* GPU memory, (batch): rows before the first key of each sequence; seqlens_k counts them */
    const int32_t *cache_lines; /* GPU memory, (batch): which line of k and v is a sequence's cache; NULL: in order */
    int64_t appended;      /* rows that flash_attn_rocm_append has added to each sequence: shape.seqlen_k counts them,
                              seqlens_k does not */
    int64_t attention_chunk; /* a query sees keys of its own chunk of so many; 0: no chunks */
    int64_t num_splits;    /* into how many parts keys are split; 0: as many as are fastest */
    const float *q_descale, *k_descale, *v_descale; /* GPU memory, (batch, heads_k), with k and v stored in FP8, of all three:
                              what undoes the scales of their numbers. With compute FP8, (batch, heads) of q; NULL where a
                              tensor is not stored in FP8: its scale is computed */

    /* A mask whose memory grows with the length: a query sees a key that all parts show; NULL parts show every key. Each
     * part is dense but for its strides, in elements, which are 0 where all sequences or all heads share it. Dense rows
     * only, beside causal, windows and sinks. */
    const uint8_t *mask_blocks; /* GPU memory, (batch, heads, blocks of queries, blocks of keys): 0 hides a block, 1 shows
                                   it where the other parts do, 2 shows it whatever they, causal and the window hide */
    int64_t mask_blocks_batch_stride, mask_blocks_head_stride;
    int64_t mask_block_q, mask_block_k; /* queries and keys of a block, multiples of 64 */
    const int32_t *mask_ranges; /* GPU memory, (batch, heads, seqlen_q, 2, 2): two ranges of keys for each query, each as
                                   its first key and the key behind its last one; the query sees the keys of both */
    int64_t mask_ranges_batch_stride, mask_ranges_head_stride;
    const int32_t *mask_ids_q, *mask_ids_k; /* GPU memory, (batch, seqlen_q) and (batch, seqlen_k): a query sees the keys
                                   with its own id */
    int64_t mask_ids_q_batch_stride, mask_ids_k_batch_stride;
    const int32_t *mask_hidden; /* GPU memory, (batch, heads, seqlen_k, 2, 2): two ranges of queries for each key, which
                                   do not see it */
    int64_t mask_hidden_batch_stride, mask_hidden_head_stride;
    const int32_t *appended_starts; /* GPU memory, (batch + 1): starts_new of flash_attn_rocm_append, for forwards alone */
    int32_t compute;      /* FLASH_ATTN_ROCM_COMPUTE_..., for forwards alone */
    int32_t reserved;     /* 0 */
    const float *k_mean;  /* GPU memory, (batch, heads_k, head_dim), with compute INT8: subtracted from each key, which changes
                             no weight and keeps keys with a large common part exact. lse is of scores without it; NULL: none */
} flash_attn_rocm_options;

typedef struct {
    size_t struct_size; /* sizeof(flash_attn_rocm_forward_call) */
    flash_attn_rocm_shape shape;
    flash_attn_rocm_tensor q, k, v, out;
    float *lse; /* GPU memory, fp32 (batch, heads, seqlen_q) or (heads, total_q), dense: natural logarithms of the sums of
                   exp(score), which a backward reads; NULL: scratch memory, not kept */
    const int32_t *block_table; /* GPU memory, int32 (batch, block_table_columns): pages of k and v; NULL: no pages */
    int64_t block_table_stride; /* elements from one row to the next */
    int64_t block_table_columns;
    int64_t page_size;          /* rows of a page */
    const int32_t *seqlens_k;   /* GPU memory, int32 (batch): how many keys of each sequence are used, at most
                                   shape.seqlen_k. A cache has room for seqlen_k keys and holds fewer. With packed rows,
                                   these lengths let decoding split the keys; NULL: every key */
    const flash_attn_rocm_options *options; /* NULL: none */
} flash_attn_rocm_forward_call;

typedef struct {
    size_t struct_size; /* sizeof(flash_attn_rocm_backward_call) */
    flash_attn_rocm_shape shape;
    flash_attn_rocm_tensor dout, q, k, v, out;
    const float *lse;                  /* of the forward */
    flash_attn_rocm_tensor dq, dk, dv; /* results; dk and dv are dense */
    const flash_attn_rocm_options *options; /* of the forward; NULL: none */
    /* Results for options that are learned, in the type in which these are stored; NULL: not computed. */
    void *dsinks; /* GPU memory, (heads) */
    void *dbias;  /* GPU memory, dense, (batch, heads, seqlen_q, seqlen_k), of a table of distances (batch, heads, seqlen_q +
                     seqlen_k - 1); batch or heads is 1 where its stride of the bias is 0 */
} flash_attn_rocm_backward_call;

/* New rows of a cache, (batch, seqlen_new, heads_k, head_dim), which go behind the keys that each sequence has. */
typedef struct {
    size_t struct_size; /* sizeof(flash_attn_rocm_append_call) */
    flash_attn_rocm_shape shape; /* of the forward that follows: seqlen_k counts the new rows too */
    flash_attn_rocm_tensor k_new, v_new, k, v; /* new rows, and the cache, of shape.dtype */
    int64_t seqlen_new;         /* rows of each sequence; of packed ones all */
    const int32_t *seqlens_k;   /* GPU memory, (batch): keys before the new ones; NULL: seqlen_k - seqlen_new each */
    const int32_t *block_table; /* as in a forward */
    int64_t block_table_stride, block_table_columns, page_size;
    const int32_t *cache_lines; /* as in the options of a forward */
    int64_t attention_chunk;    /* as in the options of a forward */
    /* Rotary embedding of the new keys and of the queries; NULL tables: none. Each query turns by its own position where
     * the shape has a causal mask, a window or chunks, else by the position of the first new key. */
    const void *rotary_cos, *rotary_sin; /* GPU memory, dense (rotary_places, rotary_half) of shape.dtype */
    int64_t rotary_places;      /* at least shape.seqlen_k */
    int64_t rotary_half;        /* so many pairs of columns turn */
    const int32_t *rotary_offsets; /* GPU memory, (batch): the place of each sequence's first new key; NULL: seqlens_k */
    int32_t rotary_interleaved; /* 1: columns 0 and 1 are a pair; 0: columns 0 and rotary_half are one */
    int32_t reserved;           /* 0 */
    flash_attn_rocm_tensor q, q_turned; /* queries, and where the turned queries go: a forward takes those. Of packed
                                           rows, those outside of every sequence are not written */
    const int32_t *starts_new; /* GPU memory, (batch + 1): where each sequence's new rows start, if they are packed; NULL */
} flash_attn_rocm_append_call;

/* The kernels of a store on a GPU. */
typedef struct flash_attn_rocm flash_attn_rocm;

/* The version of the library, such as "0.2.0". */
const char *flash_attn_rocm_version(void);

/* The message of this thread's last error, until this thread's next call; "" if there was none. */
const char *flash_attn_rocm_error(void);

/* Opens GPU number `device` with the store of its target. stores: a store `<target>.zip`, a wheel of flash_attn, or a
 * directory of stores; NULL: the path in the environment variable CANDLE_FLASH_ROCM_STORE. The HIP runtime is the library
 * that CANDLE_FLASH_ROCM_HIP names, else the first found of libamdhip64.so.7, .so.6, .so. */
int flash_attn_rocm_open(const char *stores, int device, flash_attn_rocm **opened);

/* Closes it and unloads its kernels. Work that is still on a stream must have finished, and a graph that has captured a
 * call must not be launched any more. NULL is allowed. */
void flash_attn_rocm_close(flash_attn_rocm *opened);

/* The GPU's target, such as "gfx942", as long as `opened` is open. */
const char *flash_attn_rocm_target(const flash_attn_rocm *opened);

/* Bytes of scratch memory that a call needs, 0 for most. They depend on sizes, options, strides, and on which addresses
 * are NULL, not on addresses: plan once, allocate once. */
int flash_attn_rocm_forward_scratch(const flash_attn_rocm *opened, const flash_attn_rocm_forward_call *call, size_t *bytes);
int flash_attn_rocm_backward_scratch(const flash_attn_rocm *opened, const flash_attn_rocm_backward_call *call,
                                     size_t *bytes);

/* Bytes that suffice for a forward and for each forward that differs from it by fewer keys, shape.seqlen_k. A decoding
 * step over a cache that grows needs more memory for some lengths than for the longest: allocate these bytes once. */
int flash_attn_rocm_forward_scratch_up_to(const flash_attn_rocm *opened, const flash_attn_rocm_forward_call *call,
                                          size_t *bytes);

/* Launches a call on a stream (hipStream_t; NULL is the default stream) and returns. scratch: GPU memory of so many bytes,
 * its address a multiple of 256; NULL where 0 bytes are needed. All memory stays valid until the stream has come to the
 * call's end. */
int flash_attn_rocm_forward(const flash_attn_rocm *opened, const flash_attn_rocm_forward_call *call, void *scratch,
                            size_t bytes, void *stream);
int flash_attn_rocm_backward(const flash_attn_rocm *opened, const flash_attn_rocm_backward_call *call, void *scratch,
                             size_t bytes, void *stream);

/* Launches an append on a stream and returns. It needs no scratch memory. A forward after it, with options.appended, sees
 * the new rows. */
int flash_attn_rocm_append(const flash_attn_rocm *opened, const flash_attn_rocm_append_call *call, void *stream);

/* The launches of a call, planned once for any addresses. */
typedef struct flash_attn_rocm_plan flash_attn_rocm_plan;

/* Plans a call; of its addresses, only which of them are NULL counts. Where lengths change from call to call, plan for the
 * longest, and pass each length in seqlens_k. */
int flash_attn_rocm_forward_plan(const flash_attn_rocm *opened, const flash_attn_rocm_forward_call *call,
                                 flash_attn_rocm_plan **plan);
int flash_attn_rocm_backward_plan(const flash_attn_rocm *opened, const flash_attn_rocm_backward_call *call,
                                  flash_attn_rocm_plan **plan);

/* Bytes of scratch memory that each launch of the plan needs. */
size_t flash_attn_rocm_plan_scratch(const flash_attn_rocm_plan *plan);

/* Launches a plan with a call's addresses, as flash_attn_rocm_forward and _backward do. The call is the planned one with
 * other addresses: other sizes, strides or options, another NULL, or an address that is not aligned is an error. */
int flash_attn_rocm_plan_forward(const flash_attn_rocm_plan *plan, const flash_attn_rocm_forward_call *call, void *scratch,
                                 size_t bytes, void *stream);
int flash_attn_rocm_plan_backward(const flash_attn_rocm_plan *plan, const flash_attn_rocm_backward_call *call,
                                  void *scratch, size_t bytes, void *stream);

/* Ends a plan. A plan keeps its kernels loaded, also after flash_attn_rocm_close; what that function asks for holds here
 * too. NULL is allowed. */
void flash_attn_rocm_plan_free(flash_attn_rocm_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
