/* The loop of a language model: a prompt at once, then token after token, over one cache of keys and values. The results
 * must equal a call with all tokens at once.
 *
 *     decode gfx942.zip
 *
 * `attend` has the parameters of CTranslate2's FlashAttention: new rows go to the cache at `offset`, and the queries see
 * every key up to their own. A loop of llama.cpp has the same cache.
 */
#include <math.h>

#include "gpu.h"

enum { PROMPT = 4000, TOKENS = 8, CACHE = 4096, HEADS = 8, HEADS_K = 2, DIM = 128 };

static flash_attn_rocm *gpu;
static void *scratch;
static size_t scratch_bytes;

/* One sequence of CACHE dense rows. A call may use only the first rows. */
static flash_attn_rocm_tensor rows(int heads, void *data) {
    flash_attn_rocm_tensor tensor = {.data = data, .batch_stride = (int64_t)CACHE * heads * DIM,
                                     .row_stride = (int64_t)heads * DIM, .head_stride = DIM};
    return tensor;
}

/* Attention of `count` new tokens after the first `offset`. queries and output: (count, heads, head_dim); keys and values:
 * (count, heads_k, head_dim); the caches: (CACHE, heads_k, head_dim). All in GPU memory. */
static void attend(void *queries, const void *keys, const void *values, void *output, char *cached_keys,
                   char *cached_values, int64_t count, int64_t offset) {
    const size_t row = HEADS_K * DIM * sizeof(uint16_t);
    check(hip.memcpy_(cached_keys + offset * row, keys, count * row, 3), "hipMemcpy of keys");
    check(hip.memcpy_(cached_values + offset * row, values, count * row, 3), "hipMemcpy of values");
    flash_attn_rocm_forward_call call = {
        .struct_size = sizeof call,
        .shape = {.dtype = FLASH_ATTN_ROCM_BF16, .causal = 1, .batch = 1, .heads = HEADS, .heads_k = HEADS_K,
                  .head_dim = DIM, .seqlen_q = count, .seqlen_k = offset + count,
                  .softmax_scale = 1 / sqrtf(DIM), .window_left = -1, .window_right = -1},
        .q = rows(HEADS, queries),
        .k = rows(HEADS_K, cached_keys),
        .v = rows(HEADS_K, cached_values),
        .out = rows(HEADS, output),
    };
    size_t bytes;
    check(flash_attn_rocm_forward_scratch(gpu, &call, &bytes), "flash_attn_rocm_forward_scratch");
    if (bytes > scratch_bytes) {
        scratch_bytes = 2 * bytes; /* the smaller one is freed by the end of the program */
        scratch = gpu_memory(scratch_bytes, NULL);
    }
    check(flash_attn_rocm_forward(gpu, &call, scratch, scratch_bytes, NULL), "flash_attn_rocm_forward");
}

int main(int words, char **word) {
    if (words != 2) {
        fprintf(stderr, "usage: %s STORE\n", word[0]);
        return 2;
    }
    check(flash_attn_rocm_open(word[1], 0, &gpu), "flash_attn_rocm_open");
    gpu_open();
    const int total = PROMPT + TOKENS;
    const size_t q_row = HEADS * DIM * 2, k_row = HEADS_K * DIM * 2;
    char *q = gpu_memory(total * q_row, random_numbers((size_t)total * HEADS * DIM));
    char *k = gpu_memory(total * k_row, random_numbers((size_t)total * HEADS_K * DIM));
    char *v = gpu_memory(total * k_row, random_numbers((size_t)total * HEADS_K * DIM));
    char *cached_keys = gpu_memory(CACHE * k_row, NULL), *cached_values = gpu_memory(CACHE * k_row, NULL);
    char *at_once = gpu_memory(total * q_row, NULL), *by_token = gpu_memory(total * q_row, NULL);

    attend(q, k, v, at_once, cached_keys, cached_values, total, 0);
    attend(q, k, v, by_token, cached_keys, cached_values, PROMPT, 0);
    for (int token = PROMPT; token < total; token++)
        attend(q + token * q_row, k + token * k_row, v + token * k_row, by_token + token * q_row, cached_keys,
               cached_values, 1, token);

    size_t count = (size_t)TOKENS * HEADS * DIM;
    uint16_t *expected = malloc(2 * count), *result = malloc(2 * count);
    gpu_read(expected, at_once + PROMPT * q_row, 2 * count);
    gpu_read(result, by_token + PROMPT * q_row, 2 * count);
    double difference = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        double apart = fabs(to_float(result[i]) - to_float(expected[i]));
        if (!(apart <= difference)) difference = apart; /* a NaN counts */
        if (fabs(to_float(expected[i])) > largest) largest = fabs(to_float(expected[i]));
    }
    printf("%s: %d tokens after a prompt of %d, differences up to %.1e of %.2f, %zu bytes of scratch memory\n",
           flash_attn_rocm_target(gpu), TOKENS, PROMPT, difference, largest, scratch_bytes);
    flash_attn_rocm_close(gpu);
    return !(largest > 0 && difference <= 1e-2 * largest);
}
