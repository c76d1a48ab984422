/* ggml's FLASH_ATTN_EXT through this library: what a backend of llama.cpp does with one node of its graph.
 *
 *     ggml gfx942.zip
 *
 * `supports` is the backend's supports_op: it says by name what no kernel honours. `attend` fills the call. ggml's q and
 * result are fp32, the kernels' fp16: a backend converts with its own CPY kernels, this example on the host. ggml's CPU
 * backend computes the same node for comparison.
 */
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>

#include "gpu.h"

enum { DIM = 128, HEADS = 8, HEADS_K = 2, BATCH = 2, QUERIES = 5, KEYS = 600 };

static float parameter(const struct ggml_tensor *node, int index) {
    float value;
    memcpy(&value, (const float *)node->op_params + index, sizeof value);
    return value; /* 0: scale, 1: max_bias, 2: logit_softcap */
}

/* Why the library does not serve a node, or NULL. */
static const char *unsupported(const struct ggml_tensor *node) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
    if (k->type != GGML_TYPE_F16 || v->type != GGML_TYPE_F16) return "k, v: only f16; dequantize others first";
    if (q->ne[0] % 8 || v->ne[0] % 8) return "head_dim: no multiple of 8";
    if (mask && v->ne[0] != k->ne[0]) return "mask: not with values of their own width";
    if (parameter(node, 1) > 0) return "max_bias: the mask would need a factor for each head";
    if (q->ne[3] != k->ne[3]) return "k: shared by several sequences";
    return NULL;
}

/* A tensor of ggml (dim, rows, heads, batch) at an address of the GPU. */
static flash_attn_rocm_tensor of_ggml(const struct ggml_tensor *tensor, void *data) {
    const int64_t bytes = (int64_t)ggml_type_size(tensor->type);
    flash_attn_rocm_tensor there = {.data = data, .batch_stride = (int64_t)tensor->nb[3] / bytes,
                                    .row_stride = (int64_t)tensor->nb[1] / bytes,
                                    .head_stride = (int64_t)tensor->nb[2] / bytes};
    return there;
}

/* Launches a node on the default stream. q16: q in fp16, its rows as in ggml but dense; out16: fp16 (batch, rows, heads,
 * dim), which is ggml's order of the result; k, v, mask, sinks: as in ggml, on the GPU. */
static void attend(flash_attn_rocm *gpu, const struct ggml_tensor *node, void *q16, void *k, void *v, void *mask16,
                   void *sinks, void *out16) {
    const struct ggml_tensor *q = node->src[0], *keys = node->src[1], *values = node->src[2], *mask = node->src[3];
    const int64_t dim = q->ne[0], rows = q->ne[1], heads = q->ne[2], dim_v = values->ne[0];
    flash_attn_rocm_options options = {.struct_size = sizeof options, .softcap = parameter(node, 2)};
    if (mask) {
        options.bias = mask16;
        options.bias_row_stride = (int64_t)(mask->nb[1] / 2);
        options.bias_head_stride = mask->ne[2] > 1 ? (int64_t)(mask->nb[2] / 2) : 0;
        options.bias_batch_stride = mask->ne[3] > 1 ? (int64_t)(mask->nb[3] / 2) : 0;
    }
    if (node->src[4]) {
        options.sinks = sinks;
        options.sinks_stored = FLASH_ATTN_ROCM_STORED_FP32;
    }
    flash_attn_rocm_forward_call call = {
        .struct_size = sizeof call,
        .shape = {.dtype = FLASH_ATTN_ROCM_FP16, .batch = q->ne[3], .heads = heads, .heads_k = keys->ne[2],
                  .head_dim = dim, .head_dim_v = dim_v, .seqlen_q = rows, .seqlen_k = keys->ne[1],
                  .softmax_scale = parameter(node, 0), .window_left = -1, .window_right = -1},
        .q = {.data = q16, .batch_stride = heads * rows * dim, .row_stride = dim, .head_stride = rows * dim},
        .k = of_ggml(keys, k),
        .v = of_ggml(values, v),
        .out = {.data = out16, .batch_stride = rows * heads * dim_v, .row_stride = heads * dim_v, .head_stride = dim_v},
        .options = &options,
    };
    size_t bytes;
    check(flash_attn_rocm_forward_scratch(gpu, &call, &bytes), "flash_attn_rocm_forward_scratch");
    void *scratch = bytes ? gpu_memory(bytes, NULL) : NULL;
    check(flash_attn_rocm_forward(gpu, &call, scratch, bytes, NULL), "flash_attn_rocm_forward");
}

static float number(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1.0f;
}

static void fill(struct ggml_tensor *tensor) {
    for (int64_t i = 0; i < ggml_nelements(tensor); i++) {
        if (tensor->type == GGML_TYPE_F32) ((float *)tensor->data)[i] = number();
        else ((ggml_fp16_t *)tensor->data)[i] = ggml_fp32_to_fp16(number());
    }
}

static void *upload(const struct ggml_tensor *tensor) { return gpu_memory(ggml_nbytes(tensor), tensor->data); }

int main(int words, char **word) {
    if (words != 2) {
        fprintf(stderr, "usage: %s STORE\n", word[0]);
        return 2;
    }
    struct ggml_init_params memory = {.mem_size = 64 << 20};
    struct ggml_context *ctx = ggml_init(memory);
    struct ggml_tensor *q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, DIM, QUERIES, HEADS, BATCH);
    struct ggml_tensor *k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, DIM, KEYS, HEADS_K, BATCH);
    struct ggml_tensor *v = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, DIM, KEYS, HEADS_K, BATCH);
    struct ggml_tensor *mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, KEYS, QUERIES, 1, BATCH);
    struct ggml_tensor *sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, HEADS);
    struct ggml_tensor *every[] = {q, k, v, mask, sinks};
    for (int i = 0; i < 5; i++) fill(every[i]);
    for (int row = 0; row < QUERIES * BATCH; row++) /* sequence 0 has half of the keys, and queries see no later ones */
        for (int key = 0; key < KEYS; key++) {
            int last = (row < QUERIES ? KEYS / 2 : KEYS) - QUERIES + row % QUERIES;
            if (key > last) ((ggml_fp16_t *)mask->data)[row * KEYS + key] = ggml_fp32_to_fp16(-INFINITY);
        }
    struct ggml_tensor *node = ggml_flash_attn_ext(ctx, q, k, v, mask, 1 / sqrtf(DIM), 0, 30);
    ggml_flash_attn_ext_add_sinks(node, sinks);
    if (unsupported(node)) {
        fprintf(stderr, "%s\n", unsupported(node));
        return 1;
    }

    flash_attn_rocm *gpu;
    check(flash_attn_rocm_open(word[1], 0, &gpu), "flash_attn_rocm_open");
    gpu_open();
    const int64_t elements = ggml_nelements(node);
    ggml_fp16_t *half = malloc((size_t)(elements > ggml_nelements(q) ? elements : ggml_nelements(q)) * sizeof *half);
    ggml_fp32_to_fp16_row(q->data, half, ggml_nelements(q));
    void *q16 = gpu_memory((size_t)ggml_nelements(q) * 2, half), *out16 = gpu_memory((size_t)elements * 2, NULL);
    attend(gpu, node, q16, upload(k), upload(v), upload(mask), upload(sinks), out16);
    gpu_read(half, out16, (size_t)elements * 2);

    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, node);
    ggml_graph_compute_with_ctx(ctx, graph, 2);
    float worst = 0, largest = 0;
    for (int64_t i = 0; i < elements; i++) {
        float exact = ((float *)node->data)[i], apart = fabsf(exact - ggml_fp16_to_fp32(half[i]));
        if (!(apart <= worst)) worst = apart; /* a NaN counts */
        if (fabsf(exact) > largest) largest = fabsf(exact);
    }
    printf("%s: FLASH_ATTN_EXT differs from ggml's CPU by up to %.1e of %.2f\n", flash_attn_rocm_target(gpu), worst,
           largest);
    flash_attn_rocm_close(gpu);
    return !(worst <= 1e-2f * largest);
}
