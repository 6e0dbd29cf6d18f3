#include "ffi/call.h"

#include <algorithm>

namespace jax_flash {
namespace {

constexpr std::string_view kReservedNames[] = {"version", "kernels", "operands", "results"};

// query, key and value end in a length, heads and a head dimension; what is before them is batch.
constexpr size_t kTrailingDimensions = 3;

bool IsReserved(std::string_view name) {
  return std::find(std::begin(kReservedNames), std::end(kReservedNames), name) !=
         std::end(kReservedNames);
}

ffi::ErrorOr<std::string_view> StringAttribute(const ffi::Dictionary& attributes,
                                               std::string_view name) {
  ffi::ErrorOr<std::string_view> text = attributes.get<std::string_view>(name);
  if (text.has_error()) {
    return ffi::Unexpected(InvalidArgument(Concat("attribute ", name, " must be a string")));
  }
  return text;
}

size_t CountNames(std::string_view list) {
  return list.empty() ? 0 : 1 + std::count(list.begin(), list.end(), ',');
}

// Values that the shape of a bias or mask gives.
struct DenseNames {
  std::string_view operand, axes;
  // Of its sizes; empty for those that no kernel asks for.
  std::array<std::string_view, 4> sizes;
};

constexpr DenseNames kDenseNames[] = {
    {"bias", "bias_axes", {"bias_batch", "bias_heads", "bias_queries", "bias_keys"}},
    {"mask", "mask_axes", {}},
};

int64_t Leading(const Buffer& buffer) {
  int64_t product = 1;
  for (size_t i = 0; i + kTrailingDimensions < buffer.dimensions.size(); ++i) {
    product *= buffer.dimensions[i];
  }
  return product;
}

// Counted from the end, 0 for the last.
int64_t FromEnd(const Buffer& buffer, size_t i) {
  return buffer.dimensions[buffer.dimensions.size() - 1 - i];
}

template <typename Entries>
std::string JoinNames(const Entries& entries, size_t count) {
  std::string names;
  for (size_t i = 0; i < count; ++i) names += Concat(i == 0 ? "" : ", ", entries[i].name);
  return names;
}

}  // namespace

bool Buffer::empty() const {
  return std::find(dimensions.begin(), dimensions.end(), 0) != dimensions.end();
}

std::string Buffer::Shape() const {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) {
    text += Concat(i == 0 ? "" : ", ", dimensions[i]);
  }
  return text + "]";
}

std::string_view NextName(std::string_view* list) {
  const size_t comma = std::min(list->find(','), list->size());
  const std::string_view name = list->substr(0, comma);
  list->remove_prefix(std::min(comma + 1, list->size()));
  return name;
}

ffi::ErrorOr<std::string_view> KernelsOf(const ffi::Dictionary& attributes) {
  const ffi::ErrorOr<int32_t> version = attributes.get<int32_t>("version");
  if (version.has_error()) {
    return ffi::Unexpected(InvalidArgument("attribute version must be an int32"));
  }
  if (*version != kCallVersion) {
    return ffi::Unexpected(InvalidArgument(
        Concat("call version ", *version, "; this jax_flash extension takes version ", kCallVersion,
               ": run the program with the jax_flash release that exported it")));
  }
  ffi::ErrorOr<std::string_view> kernels = StringAttribute(attributes, "kernels");
  if (!kernels.has_error() && kernels->empty()) {
    return ffi::Unexpected(InvalidArgument("attribute kernels names no kernel"));
  }
  return kernels;
}

ffi::Error Call::Parse(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                       const ffi::Dictionary& attributes) {
  JAX_FLASH_RETURN_IF_ERROR(ParseBuffers(operands, results, attributes));
  JAX_FLASH_RETURN_IF_ERROR(AddShapeValues());
  JAX_FLASH_RETURN_IF_ERROR(ParseValues(attributes));
  return CheckEmptiness();
}

const Buffer* Call::FindBuffer(std::string_view name) const {
  for (size_t i = 0; i < buffer_count_; ++i) {
    if (buffers_[i].name == name) return &buffers_[i];
  }
  return nullptr;
}

const Value* Call::FindValue(std::string_view name) const {
  for (size_t i = 0; i < value_count_; ++i) {
    if (values_[i].name == name) return &values_[i].value;
  }
  return nullptr;
}

std::string Call::BufferNames() const { return JoinNames(buffers_, buffer_count_); }

std::string Call::ValueNames() const { return JoinNames(values_, value_count_); }

ffi::Error Call::ParseBuffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                              const ffi::Dictionary& attributes) {
  ffi::ErrorOr<std::string_view> operand_names = StringAttribute(attributes, "operands");
  if (operand_names.has_error()) return operand_names.error();
  ffi::ErrorOr<std::string_view> result_names = StringAttribute(attributes, "results");
  if (result_names.has_error()) return result_names.error();
  if (CountNames(*operand_names) != operands.size() ||
      CountNames(*result_names) != results.size()) {
    return InvalidArgument(Concat("the call has ", operands.size(), " operands and ",
                                  results.size(), " results, but the attributes name ",
                                  CountNames(*operand_names), " (", *operand_names, ") and ",
                                  CountNames(*result_names), " (", *result_names, ")"));
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = operands.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    JAX_FLASH_RETURN_IF_ERROR(AddBuffer(NextName(&*operand_names), *buffer));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    JAX_FLASH_RETURN_IF_ERROR(AddBuffer(NextName(&*result_names), **buffer));
  }
  return ffi::Error::Success();
}

ffi::Error Call::ParseValues(const ffi::Dictionary& attributes) {
  for (const std::string_view name : attributes) {
    if (IsReserved(name)) continue;
    if (attributes.contains<int32_t>(name)) {
      JAX_FLASH_RETURN_IF_ERROR(AddValue(name, int64_t{*attributes.get<int32_t>(name)}));
    } else if (attributes.contains<int64_t>(name)) {
      JAX_FLASH_RETURN_IF_ERROR(AddValue(name, *attributes.get<int64_t>(name)));
    } else if (attributes.contains<float>(name)) {
      JAX_FLASH_RETURN_IF_ERROR(AddValue(name, *attributes.get<float>(name)));
    } else {
      return InvalidArgument(
          Concat("attribute ", name, " must be a scalar of type int32, int64 or float32"));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Call::AddShapeValues() {
  const Buffer* query = FindBuffer("query");
  const Buffer* key = FindBuffer("key");
  const Buffer* value = FindBuffer("value");
  for (const Buffer* buffer : {query, key, value}) {
    if (buffer != nullptr && buffer->dimensions.size() < kTrailingDimensions) {
      return InvalidArgument(Concat(buffer->name, " has shape ", buffer->Shape(),
                                    "; must have at least 3 dimensions: length, heads, head_dim"));
    }
  }
  if (query != nullptr) {
    JAX_FLASH_RETURN_IF_ERROR(AddValue("batch", Leading(*query)));
    JAX_FLASH_RETURN_IF_ERROR(AddValue("query_length", FromEnd(*query, 2)));
    JAX_FLASH_RETURN_IF_ERROR(AddValue("query_heads", FromEnd(*query, 1)));
    JAX_FLASH_RETURN_IF_ERROR(AddValue("head_dim", FromEnd(*query, 0)));
  }
  if (key != nullptr) {
    JAX_FLASH_RETURN_IF_ERROR(AddValue("key_length", FromEnd(*key, 2)));
    JAX_FLASH_RETURN_IF_ERROR(AddValue("key_heads", FromEnd(*key, 1)));
  }
  if (value != nullptr) {
    JAX_FLASH_RETURN_IF_ERROR(AddValue("value_head_dim", FromEnd(*value, 0)));
  }
  if (query != nullptr && key != nullptr) {
    JAX_FLASH_RETURN_IF_ERROR(AddDenseValues(*query, *key));
    JAX_FLASH_RETURN_IF_ERROR(CheckAgreement(*query, *key, 3));
    if (FromEnd(*query, 0) != FromEnd(*key, 0)) {
      return InvalidArgument(Concat("query ", query->Shape(), " and key ", key->Shape(),
                                    " must have the same head dimension"));
    }
  }
  if (const Buffer* rows = FindBuffer("lse_log2"); rows != nullptr && rows->dimensions.size() > 0) {
    JAX_FLASH_RETURN_IF_ERROR(AddValue("padded_query_length", FromEnd(*rows, 0)));
  }
  if (key != nullptr && value != nullptr) return CheckAgreement(*key, *value, 1);
  return ffi::Error::Success();
}

// Kernels step along the axes that bias and mask have, so their sizes are checked here.
ffi::Error Call::AddDenseValues(const Buffer& query, const Buffer& key) {
  const int64_t full[] = {Leading(query), FromEnd(query, 1), FromEnd(query, 2), FromEnd(key, 2)};
  for (const DenseNames& names : kDenseNames) {
    int64_t axes = 0;
    if (const Buffer* buffer = FindBuffer(names.operand)) {
      if (buffer->dimensions.size() < kTrailingDimensions) {
        return InvalidArgument(Concat(buffer->name, " has shape ", buffer->Shape(),
                                      "; must have at least 3 dimensions: heads, queries, keys"));
      }
      const int64_t sizes[] = {Leading(*buffer), FromEnd(*buffer, 2), FromEnd(*buffer, 1),
                               FromEnd(*buffer, 0)};
      for (int axis = 0; axis < 4; ++axis) {
        if (sizes[axis] != 1 && sizes[axis] != full[axis]) {
          return InvalidArgument(Concat(buffer->name, " has shape ", buffer->Shape(),
                                        "; batch, heads, queries and keys must each be 1 or ",
                                        full[0], ", ", full[1], ", ", full[2], " and ", full[3]));
        }
        if (sizes[axis] != 1) axes |= int64_t{1} << axis;
        if (!names.sizes[axis].empty()) {
          JAX_FLASH_RETURN_IF_ERROR(AddValue(names.sizes[axis], sizes[axis]));
        }
      }
    }
    JAX_FLASH_RETURN_IF_ERROR(AddValue(names.axes, axes));
  }
  return ffi::Error::Success();
}

// That the shapes are equal but for the last `trailing` dimensions.
ffi::Error Call::CheckAgreement(const Buffer& first, const Buffer& second, size_t trailing) const {
  const ffi::Span<const int64_t>& a = first.dimensions;
  const ffi::Span<const int64_t>& b = second.dimensions;
  if (a.size() == b.size() && std::equal(a.begin(), a.end() - trailing, b.begin())) {
    return ffi::Error::Success();
  }
  return InvalidArgument(Concat(first.name, " ", first.Shape(), " and ", second.name, " ",
                                second.Shape(), " must have equal dimensions but for the last ",
                                trailing));
}

ffi::Error Call::CheckEmptiness() {
  const Buffer* query = FindBuffer("query");
  if (query != nullptr && Leading(*query) == 0) {
    empty_ = true;
    return ffi::Error::Success();
  }
  for (size_t i = 0; i < buffer_count_; ++i) {
    if (buffers_[i].empty()) {
      return InvalidArgument(Concat("empty operand or result ", buffers_[i].name, " ",
                                    buffers_[i].Shape(), ": such calls are handled in Python"));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Call::AddBuffer(std::string_view name, const ffi::AnyBuffer& buffer) {
  if (name.empty()) return InvalidArgument("an operand or result has an empty name");
  if (FindBuffer(name) != nullptr) {
    return InvalidArgument(Concat("two operands or results are named ", name));
  }
  if (buffer_count_ == kMaxBuffers) {
    return InvalidArgument(Concat("more than ", kMaxBuffers, " operands and results"));
  }
  buffers_[buffer_count_++] =
      Buffer{name, buffer.untyped_data(), buffer.element_type(), buffer.dimensions()};
  return ffi::Error::Success();
}

ffi::Error Call::AddValue(std::string_view name, Value value) {
  if (FindValue(name) != nullptr) {
    return InvalidArgument(
        Concat("attribute ", name, " has the name of a value that the operands' shapes give"));
  }
  if (value_count_ == kMaxValues)
    return InvalidArgument(Concat("more than ", kMaxValues, " values"));
  values_[value_count_++] = NamedValue{name, value};
  return ffi::Error::Success();
}

}  // namespace jax_flash
