// A small transformer with random weights, on the CPU. It knows nothing of kvstate: it is told where the rows
// of K and V lie and which of them each token sees.
//
// Every token is computed by itself, and attention sums in the order it is given. So logits depend on what is
// attended to, not on the ubatch or on where in the cache it lies: two runs can be compared bit for bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace demo {

using Vector = std::vector<float>;

// The K and V of one layer, as rows, and what the tokens of a ubatch do with them.
struct LayerCache {
    std::byte *k;
    std::byte *v;
    std::size_t k_stride;
    std::size_t v_stride;
    const std::vector<uint32_t> *cells;              // token i writes row cells[i]
    const std::vector<std::vector<uint32_t>> *seen;  // and reads the rows seen[i], in this order

    float *k_row(uint32_t cell) const { return reinterpret_cast<float *>(k + cell * k_stride); }
    float *v_row(uint32_t cell) const { return reinterpret_cast<float *>(v + cell * v_stride); }
};

class Matrix {
public:
    Matrix(std::mt19937 &random, uint32_t n_out, uint32_t n_in)
        : n_in(n_in), weights(std::size_t(n_out) * n_in) {
        // Uniform with variance 1 / n_in, so that activations keep their size from layer to layer.
        const float width = std::sqrt(12.0f / float(n_in));
        for (float &weight : weights) {
            weight = (float(random() >> 8) * 0x1p-24f - 0.5f) * width;
        }
    }

    const float *row(uint32_t i) const { return &weights[std::size_t(i) * n_in]; }

    Vector operator*(const Vector &x) const {
        Vector y(weights.size() / n_in);
        for (uint32_t i = 0; i < y.size(); ++i) {
            y[i] = dot(row(i), x.data(), n_in);
        }
        return y;
    }

    static float dot(const float *a, const float *b, std::size_t n) {
        float sum = 0.0f;
        for (std::size_t i = 0; i < n; ++i) {
            sum += a[i] * b[i];
        }
        return sum;
    }

private:
    uint32_t n_in;
    Vector weights;
};

class Transformer {
public:
    static constexpr uint32_t n_layer = 4;
    static constexpr uint32_t n_vocab = 512;
    static constexpr uint32_t n_embd = 64;
    static constexpr uint32_t n_head = 4;
    static constexpr uint32_t n_head_kv = 2;
    static constexpr uint32_t n_embd_head = n_embd / n_head;
    static constexpr uint32_t n_embd_kv = n_embd_head * n_head_kv;
    static constexpr uint32_t n_ff = 128;

    const uint32_t seed;  // of the weights

    explicit Transformer(uint32_t seed)
        : seed(seed), random(seed), embedding(random, n_vocab, n_embd), output(random, n_vocab, n_embd) {
        for (uint32_t il = 0; il < n_layer; ++il) {
            layers.emplace_back(random);
        }
    }

    // Computes a ubatch and gives the logits of each token. caches: one for each layer.
    std::vector<Vector> forward(const std::vector<int32_t> &tokens, const std::vector<int32_t> &positions,
                                const std::vector<LayerCache> &caches) const {
        std::vector<Vector> xs;
        for (int32_t token : tokens) {
            const float *row = embedding.row(uint32_t(token));
            xs.emplace_back(row, row + n_embd);
        }
        for (uint32_t il = 0; il < n_layer; ++il) {
            // All rows of a layer are written before any is read: tokens of one ubatch see each other.
            for (std::size_t i = 0; i < xs.size(); ++i) {
                write_kv(layers[il], xs[i], positions[i], caches[il], i);
            }
            for (std::size_t i = 0; i < xs.size(); ++i) {
                add(xs[i], attention(layers[il], xs[i], positions[i], caches[il], i));
                add(xs[i], feed_forward(layers[il], xs[i]));
            }
        }
        for (Vector &x : xs) {
            x = output * norm(x);
        }
        return xs;
    }

private:
    struct Layer {
        explicit Layer(std::mt19937 &random)
            : q(random, n_embd, n_embd), k(random, n_embd_kv, n_embd), v(random, n_embd_kv, n_embd),
              o(random, n_embd, n_embd), gate(random, n_ff, n_embd), up(random, n_ff, n_embd),
              down(random, n_embd, n_ff) {}
        Matrix q, k, v, o, gate, up, down;
    };

    static void write_kv(const Layer &layer, const Vector &x, int32_t position, const LayerCache &cache,
                         std::size_t i) {
        const Vector input = norm(x);
        const Vector k = rope(layer.k * input, position);
        const Vector v = layer.v * input;
        const uint32_t cell = (*cache.cells)[i];
        std::copy(k.begin(), k.end(), cache.k_row(cell));
        std::copy(v.begin(), v.end(), cache.v_row(cell));
    }

    static Vector attention(const Layer &layer, const Vector &x, int32_t position, const LayerCache &cache,
                            std::size_t i) {
        const Vector q = rope(layer.q * norm(x), position);
        const std::vector<uint32_t> &seen = (*cache.seen)[i];
        Vector mixed(n_embd, 0.0f);
        Vector scores(seen.size());
        for (uint32_t head = 0; head < n_head; ++head) {
            const std::size_t of_head = head * n_embd_head;
            const std::size_t of_kv_head = head / (n_head / n_head_kv) * n_embd_head;
            for (std::size_t j = 0; j < seen.size(); ++j) {
                const float *k = cache.k_row(seen[j]) + of_kv_head;
                scores[j] = Matrix::dot(&q[of_head], k, n_embd_head) / std::sqrt(float(n_embd_head));
            }
            softmax(scores);
            for (std::size_t j = 0; j < seen.size(); ++j) {
                const float *v = cache.v_row(seen[j]) + of_kv_head;
                for (uint32_t e = 0; e < n_embd_head; ++e) {
                    mixed[of_head + e] += scores[j] * v[e];
                }
            }
        }
        return layer.o * mixed;
    }

    static Vector feed_forward(const Layer &layer, const Vector &x) {
        const Vector input = norm(x);
        Vector hidden = layer.gate * input;
        const Vector up = layer.up * input;
        for (std::size_t e = 0; e < hidden.size(); ++e) {
            hidden[e] = hidden[e] / (1.0f + std::exp(-hidden[e])) * up[e];
        }
        return layer.down * hidden;
    }

    static Vector norm(Vector x) {
        const float scale =
            1.0f / std::sqrt(Matrix::dot(x.data(), x.data(), x.size()) / float(x.size()) + 1e-6f);
        for (float &value : x) {
            value *= scale;
        }
        return x;
    }

    static Vector rope(Vector x, int32_t position) {
        constexpr uint32_t half = n_embd_head / 2;
        for (std::size_t head = 0; head < x.size(); head += n_embd_head) {
            for (uint32_t e = 0; e < half; ++e) {
                const float angle = float(position) * std::pow(10000.0f, -float(e) / float(half));
                const float a = x[head + e];
                const float b = x[head + e + half];
                x[head + e] = a * std::cos(angle) - b * std::sin(angle);
                x[head + e + half] = a * std::sin(angle) + b * std::cos(angle);
            }
        }
        return x;
    }

    static void softmax(Vector &x) {
        const float max = *std::max_element(x.begin(), x.end());
        float sum = 0.0f;
        for (float &value : x) {
            value = std::exp(value - max);
            sum += value;
        }
        for (float &value : x) {
            value /= sum;
        }
    }

    static void add(Vector &x, const Vector &y) {
        for (std::size_t e = 0; e < x.size(); ++e) {
            x[e] += y[e];
        }
    }

    std::mt19937 random;
    Matrix embedding;
    Matrix output;
    std::vector<Layer> layers;
};

}  // namespace demo
