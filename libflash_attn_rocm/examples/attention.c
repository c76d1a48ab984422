/* A causal forward and backward with grouped heads, compared with attention in double precision on the CPU.
 *
 *     attention gfx942.zip
 */
#include <math.h>

#include "gpu.h"

enum { BATCH = 2, SEQLEN = 130, HEADS = 4, HEADS_K = 2, DIM = 64 };
enum { Q_SIZE = BATCH * SEQLEN * HEADS * DIM, K_SIZE = BATCH * SEQLEN * HEADS_K * DIM };

static double out[Q_SIZE], dq[Q_SIZE], dk[K_SIZE], dv[K_SIZE];

static size_t at(int heads, int sequence, int row, int head) {
    return (((size_t)sequence * SEQLEN + row) * heads + head) * DIM;
}

static double dot(const uint16_t *a, const uint16_t *b) {
    double sum = 0;
    for (int d = 0; d < DIM; d++) sum += (double)to_float(a[d]) * to_float(b[d]);
    return sum;
}

/* The definition: P = softmax(scale q k^T), out = P v, and its derivatives. */
static void reference(const uint16_t *q, const uint16_t *k, const uint16_t *v, const uint16_t *dout, double scale) {
    static double p[SEQLEN];
    for (int sequence = 0; sequence < BATCH; sequence++)
        for (int head = 0; head < HEADS; head++)
            for (int row = 0; row < SEQLEN; row++) {
                int head_k = head / (HEADS / HEADS_K);
                size_t i = at(HEADS, sequence, row, head);
                double sum = 0, delta = 0;
                for (int key = 0; key <= row; key++)
                    sum += p[key] = exp(scale * dot(q + i, k + at(HEADS_K, sequence, key, head_k)));
                for (int key = 0; key <= row; key++) {
                    size_t j = at(HEADS_K, sequence, key, head_k);
                    p[key] /= sum;
                    delta += p[key] * dot(dout + i, v + j);
                    for (int d = 0; d < DIM; d++) out[i + d] += p[key] * to_float(v[j + d]);
                }
                for (int key = 0; key <= row; key++) {
                    size_t j = at(HEADS_K, sequence, key, head_k);
                    double ds = scale * p[key] * (dot(dout + i, v + j) - delta);
                    for (int d = 0; d < DIM; d++) {
                        dq[i + d] += ds * to_float(k[j + d]);
                        dk[j + d] += ds * to_float(q[i + d]);
                        dv[j + d] += p[key] * to_float(dout[i + d]);
                    }
                }
            }
}

static int compare(const char *name, const void *result, const double *expected, size_t count) {
    uint16_t *numbers = malloc(count * sizeof *numbers);
    double error = 0, largest = 0;
    gpu_read(numbers, result, count * sizeof *numbers);
    for (size_t i = 0; i < count; i++) {
        double difference = fabs(to_float(numbers[i]) - expected[i]);
        if (!(difference <= error)) error = difference; /* a NaN counts */
        if (fabs(expected[i]) > largest) largest = fabs(expected[i]);
    }
    free(numbers);
    printf("%-3s error %.1e of %.2f\n", name, error, largest);
    return !(error < 1e-2 * largest);
}

static flash_attn_rocm_tensor dense(int heads, void *data) {
    flash_attn_rocm_tensor tensor = {.data = data, .batch_stride = (int64_t)SEQLEN * heads * DIM,
                                     .row_stride = (int64_t)heads * DIM, .head_stride = DIM};
    return tensor;
}

int main(int count, char **words) {
    if (count != 2) {
        fprintf(stderr, "usage: %s STORE\n", words[0]);
        return 2;
    }
    flash_attn_rocm *gpu;
    check(flash_attn_rocm_open(words[1], 0, &gpu), "flash_attn_rocm_open");
    gpu_open();
    uint16_t *q = random_numbers(Q_SIZE), *k = random_numbers(K_SIZE), *v = random_numbers(K_SIZE);
    uint16_t *dout = random_numbers(Q_SIZE);
    double scale = 1 / sqrt(DIM);

    flash_attn_rocm_forward_call forward = {
        .struct_size = sizeof forward,
        .shape = {.dtype = FLASH_ATTN_ROCM_BF16, .causal = 1, .batch = BATCH, .heads = HEADS, .heads_k = HEADS_K,
                  .head_dim = DIM, .seqlen_q = SEQLEN, .seqlen_k = SEQLEN, .softmax_scale = (float)scale,
                  .window_left = -1, .window_right = -1},
        .q = dense(HEADS, gpu_memory(Q_SIZE * 2, q)),
        .k = dense(HEADS_K, gpu_memory(K_SIZE * 2, k)),
        .v = dense(HEADS_K, gpu_memory(K_SIZE * 2, v)),
        .out = dense(HEADS, gpu_memory(Q_SIZE * 2, NULL)),
        .lse = gpu_memory(BATCH * HEADS * SEQLEN * sizeof(float), NULL),
    };
    flash_attn_rocm_backward_call backward = {
        .struct_size = sizeof backward, .shape = forward.shape,
        .dout = dense(HEADS, gpu_memory(Q_SIZE * 2, dout)),
        .q = forward.q, .k = forward.k, .v = forward.v, .out = forward.out, .lse = forward.lse,
        .dq = dense(HEADS, gpu_memory(Q_SIZE * 2, NULL)),
        .dk = dense(HEADS_K, gpu_memory(K_SIZE * 2, NULL)),
        .dv = dense(HEADS_K, gpu_memory(K_SIZE * 2, NULL)),
    };
    size_t bytes, bytes_backward;
    check(flash_attn_rocm_forward_scratch(gpu, &forward, &bytes), "flash_attn_rocm_forward_scratch");
    check(flash_attn_rocm_backward_scratch(gpu, &backward, &bytes_backward), "flash_attn_rocm_backward_scratch");
    if (bytes_backward > bytes) bytes = bytes_backward;
    void *scratch = bytes ? gpu_memory(bytes, NULL) : NULL;
    check(flash_attn_rocm_forward(gpu, &forward, scratch, bytes, NULL), "flash_attn_rocm_forward");
    check(flash_attn_rocm_backward(gpu, &backward, scratch, bytes, NULL), "flash_attn_rocm_backward");

    printf("%s, %zu bytes of scratch memory\n", flash_attn_rocm_target(gpu), bytes);
    reference(q, k, v, dout, scale);
    int wrong = compare("out", forward.out.data, out, Q_SIZE) + compare("dq", backward.dq.data, dq, Q_SIZE) +
                compare("dk", backward.dk.data, dk, K_SIZE) + compare("dv", backward.dv.data, dv, K_SIZE);
    flash_attn_rocm_close(gpu);
    return wrong != 0;
}
