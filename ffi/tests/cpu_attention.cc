#include "ffi/tests/cpu_attention.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "ffi/tests/cpu_buffers.h"

namespace jax_flash {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

std::atomic<int64_t> forward_calls{0};
std::atomic<int64_t> backward_calls{0};

float Dot(const float* left, const float* right, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += left[i] * right[i];
  return sum;
}

void AddScaled(float* sum, float factor, const float* term, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += factor * term[i];
}

}  // namespace

ffi::Error CpuAttention::Load(const Call& call, std::string_view kernels) {
  batch_ = Integer(call, "batch");
  query_length_ = Integer(call, "query_length");
  query_heads_ = Integer(call, "query_heads");
  key_length_ = Integer(call, "key_length");
  key_heads_ = Integer(call, "key_heads");
  head_dim_ = Integer(call, "head_dim");
  value_head_dim_ = Integer(call, "value_head_dim");
  if (key_heads_ == 0 || query_heads_ % key_heads_ != 0) {
    return InvalidArgument(Concat(query_heads_, " query heads, ", key_heads_, " key heads"));
  }
  scale_ = Float(call, "scale");
  soft_cap_ = Float(call, "soft_cap");
  // Which bounds there are is in the kernels' names; see jax_flash/spec/band_mask.py.
  const auto named = [&](std::string_view word) { return kernels.find(word) != kernels.npos; };
  const bool has_both = named("_band") || named("_ragged") || named("_general");
  has_lower_ = named("_lower") || has_both;
  has_upper_ = named("_causal") || has_both;
  rows_per_query_ = Integer(call, "rows_per_query");
  if (rows_per_query_ <= 0) {
    return InvalidArgument(Concat(rows_per_query_, " rows of each query"));
  }
  band_lower_ = Integer(call, "band_lower");
  band_upper_ = Integer(call, "band_upper");
  return LoadValues(call);
}

ffi::Error CpuAttention::LoadValues(const Call& call) {
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "query", &query_));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "key", &key_));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "value", &value_));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "sinks", &sinks_));
  JAX_FLASH_RETURN_IF_ERROR(ReadIntegers(call, "query_offset", &query_offset_));
  JAX_FLASH_RETURN_IF_ERROR(ReadIntegers(call, "query_lengths", &query_lengths_));
  JAX_FLASH_RETURN_IF_ERROR(ReadIntegers(call, "key_lengths", &key_lengths_));
  JAX_FLASH_RETURN_IF_ERROR(ReadIntegers(call, "query_tile_ids", &query_segment_ids_));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "bias", &bias_));
  JAX_FLASH_RETURN_IF_ERROR(ReadIntegers(call, "mask", &mask_));
  bias_axes_ = Integer(call, "bias_axes");
  mask_axes_ = Integer(call, "mask_axes");
  return ReadIntegers(call, "key_tile_ids", &key_segment_ids_);
}

bool CpuAttention::IsValidQuery(const Row& row) const {
  if (!query_lengths_.empty() && row.query >= query_lengths_[row.batch]) return false;
  return query_segment_ids_.empty() || IdAt(query_segment_ids_, row.batch, row.query) >= 0;
}

int64_t CpuAttention::IdAt(const std::vector<int64_t>& ids, int64_t batch, int64_t place) const {
  // Of whole tiles, so that a batch element may have more ids than it has positions.
  return ids[batch * (static_cast<int64_t>(ids.size()) / batch_) + place];
}

bool CpuAttention::MayAttend(const Row& row, int64_t key) const {
  if (!IsValidQuery(row)) return false;
  const int64_t offset = query_offset_.empty() ? 0 : query_offset_[row.batch];
  const int64_t distance = key - row.query / rows_per_query_ - offset;
  if (has_lower_ && distance < band_lower_) return false;
  if (has_upper_ && distance > band_upper_) return false;
  if (!key_lengths_.empty() && key >= key_lengths_[row.batch]) return false;
  if (!mask_.empty() && mask_[DenseIndex(mask_axes_, row, key)] == 0) return false;
  return key_segment_ids_.empty() || IdAt(key_segment_ids_, row.batch, key) ==
                                         IdAt(query_segment_ids_, row.batch, row.query);
}

int64_t CpuAttention::QueryStart(const Row& row, int64_t width) const {
  return ((row.batch * query_length_ + row.query) * query_heads_ + row.head) * width;
}

int64_t CpuAttention::KeyStart(const Row& row, int64_t key, int64_t width) const {
  const int64_t head = row.head / (query_heads_ / key_heads_);
  return ((row.batch * key_length_ + key) * key_heads_ + head) * width;
}

int64_t CpuAttention::DenseIndex(int64_t axes, const Row& row, int64_t key) const {
  const int64_t places[] = {row.batch, row.head, row.query, key};
  const int64_t sizes[] = {batch_, query_heads_, query_length_, key_length_};
  int64_t index = 0;
  for (int axis = 0; axis < 4; ++axis) {
    if ((axes >> axis & 1) != 0) index = index * sizes[axis] + places[axis];
  }
  return index;
}

float CpuAttention::CappedLogit(const Row& row, int64_t key) const {
  const float product = scale_ * Dot(&query_[QueryStart(row, head_dim_)],
                                     &key_[KeyStart(row, key, head_dim_)], head_dim_);
  return soft_cap_ > 0 ? soft_cap_ * std::tanh(product / soft_cap_) : product;
}

float CpuAttention::Bias(const Row& row, int64_t key) const {
  return bias_.empty() ? 0 : bias_[DenseIndex(bias_axes_, row, key)];
}

template <typename Visit>
void CpuAttention::ForEachRow(const Visit& visit) const {
  for (int64_t batch = 0; batch < batch_; ++batch) {
    for (int64_t head = 0; head < query_heads_; ++head) {
      for (int64_t query = 0; query < query_length_; ++query) visit(Row{batch, query, head});
    }
  }
}

ffi::Error CpuAttention::Forward(const Call& call) const {
  std::vector<float> output(batch_ * query_length_ * query_heads_ * value_head_dim_);
  std::vector<float> lse(batch_ * query_length_ * query_heads_, -kInfinity);
  std::vector<float> logits(key_length_);
  ForEachRow([&](const Row& row) {
    if (!IsValidQuery(row)) return;
    const bool has_sink = !sinks_.empty();
    const float sink = has_sink ? sinks_[row.batch * query_heads_ + row.head] : -kInfinity;
    float maximum = sink;
    for (int64_t key = 0; key < key_length_; ++key) {
      logits[key] = MayAttend(row, key) ? CappedLogit(row, key) + Bias(row, key) : -kInfinity;
      maximum = std::max(maximum, logits[key]);
    }
    if (maximum == -kInfinity) return;
    float sum = std::exp(sink - maximum);
    for (const float logit : logits) sum += std::exp(logit - maximum);
    float* const row_output = &output[QueryStart(row, value_head_dim_)];
    for (int64_t key = 0; key < key_length_; ++key) {
      // A hidden value may be NaN, and 0 * NaN is NaN.
      if (logits[key] == -kInfinity) continue;
      AddScaled(row_output, std::exp(logits[key] - maximum) / sum,
                &value_[KeyStart(row, key, value_head_dim_)], value_head_dim_);
    }
    lse[QueryStart(row, 1)] = maximum + std::log(sum);
  });
  JAX_FLASH_RETURN_IF_ERROR(Write(call, "output", output));
  return Write(call, "lse", lse);
}

ffi::Error CpuAttention::Backward(const Call& call) const {
  std::vector<float> output, lse, d_output, d_lse;
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "output", &output));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "lse", &lse));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "d_output", &d_output));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "d_lse", &d_lse));
  std::vector<float> d_query(query_.size()), d_key(key_.size()), d_value(value_.size());
  // Row statistics, [batch, heads, padded queries], as the kernels leave them.
  const Buffer* const rows = call.FindBuffer("delta");
  if (rows == nullptr) return InvalidArgument("the call has no result delta");
  const int64_t padded_length = rows->dimensions[rows->dimensions.size() - 1];
  std::vector<float> deltas(batch_ * query_heads_ * padded_length);
  std::vector<float> lse_log2(deltas.size(), kInfinity);
  ForEachRow([&](const Row& row) {
    const int64_t scalar = QueryStart(row, 1);
    if (lse[scalar] == -kInfinity || !IsValidQuery(row)) return;
    const int64_t wide = QueryStart(row, value_head_dim_);
    const float delta = Dot(&output[wide], &d_output[wide], value_head_dim_) - d_lse[scalar];
    const int64_t index = (row.batch * query_heads_ + row.head) * padded_length + row.query;
    deltas[index] = delta;
    lse_log2[index] = lse[scalar] * kLog2E;
    for (int64_t key = 0; key < key_length_; ++key) {
      if (!MayAttend(row, key)) continue;
      const float logit = CappedLogit(row, key);
      const float weight = std::exp(logit + Bias(row, key) - lse[scalar]);
      const int64_t value = KeyStart(row, key, value_head_dim_);
      float d_logit = weight * (Dot(&d_output[wide], &value_[value], value_head_dim_) - delta);
      if (soft_cap_ > 0) d_logit *= 1 - (logit / soft_cap_) * (logit / soft_cap_);
      const int64_t query_start = QueryStart(row, head_dim_);
      const int64_t key_start = KeyStart(row, key, head_dim_);
      AddScaled(&d_query[query_start], scale_ * d_logit, &key_[key_start], head_dim_);
      AddScaled(&d_key[key_start], scale_ * d_logit, &query_[query_start], head_dim_);
      AddScaled(&d_value[value], weight, &d_output[wide], value_head_dim_);
    }
  });
  JAX_FLASH_RETURN_IF_ERROR(Write(call, "delta", deltas));
  JAX_FLASH_RETURN_IF_ERROR(Write(call, "lse_log2", lse_log2));
  JAX_FLASH_RETURN_IF_ERROR(Write(call, "d_query", d_query));
  JAX_FLASH_RETURN_IF_ERROR(Write(call, "d_key", d_key));
  return Write(call, "d_value", d_value);
}

ffi::Error CpuAttention::BackwardBias(const Call& call) const {
  std::vector<float> d_output, lse_log2, delta;
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "d_output", &d_output));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "lse_log2", &lse_log2));
  JAX_FLASH_RETURN_IF_ERROR(ReadFloats(call, "delta", &delta));
  const int64_t padded_length = Integer(call, "padded_query_length");
  std::vector<float> d_bias(bias_.size());
  ForEachRow([&](const Row& row) {
    const int64_t index = (row.batch * query_heads_ + row.head) * padded_length + row.query;
    const float* const row_d_output = &d_output[QueryStart(row, value_head_dim_)];
    for (int64_t key = 0; key < key_length_; ++key) {
      if (!MayAttend(row, key)) continue;
      const float logit = CappedLogit(row, key) + Bias(row, key);
      const float weight = std::exp2(logit * kLog2E - lse_log2[index]);
      const float d_weight =
          Dot(row_d_output, &value_[KeyStart(row, key, value_head_dim_)], value_head_dim_);
      d_bias[DenseIndex(bias_axes_, row, key)] += weight * (d_weight - delta[index]);
    }
  });
  return Write(call, "d_bias", d_bias);
}

namespace {

ffi::Error Run(ffi::RemainingArgs operands, ffi::RemainingRets results,
               ffi::Dictionary attributes) {
  const ffi::ErrorOr<std::string_view> kernels = KernelsOf(attributes);
  if (kernels.has_error()) return kernels.error();
  Call call;
  JAX_FLASH_RETURN_IF_ERROR(call.Parse(operands, results, attributes));
  CpuAttention attention;
  JAX_FLASH_RETURN_IF_ERROR(attention.Load(call, *kernels));
  if (call.FindBuffer("d_bias") != nullptr) return attention.BackwardBias(call);
  const bool backward = call.FindBuffer("d_output") != nullptr;
  ++(backward ? backward_calls : forward_calls);
  if (!backward) return attention.Forward(call);
  for (const char* name : {"dq_accumulator", "dq_semaphores", "tile_counter"}) Spoil(call, name);
  return attention.Backward(call);
}

}  // namespace
}  // namespace jax_flash

namespace ffi = ::xla::ffi;

// Visible in the library, whose other symbols are hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCpuAttention, jax_flash::Run,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

extern "C" int64_t JaxFlashCpuAttentionCalls(int32_t backward) {
  return backward != 0 ? jax_flash::backward_calls : jax_flash::forward_calls;
}

#pragma GCC visibility pop
