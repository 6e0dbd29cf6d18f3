#include "ffi/dtype.h"

namespace jax_flash {
namespace {

using ffi::DataType;
using Map = cuda::TensorMapDataType;

// A tensor map copies bytes, so types that it has no name for go by an integer of their size.
constexpr Dtype kDtypes[] = {
    {"bf16", DataType::BF16, 2, Map::kBfloat16},      {"f16", DataType::F16, 2, Map::kFloat16},
    {"f32", DataType::F32, 4, Map::kFloat32},         {"f64", DataType::F64, 8, Map::kFloat64},
    {"f8e4m3fn", DataType::F8E4M3FN, 1, Map::kUint8}, {"f8e5m2", DataType::F8E5M2, 1, Map::kUint8},
    {"pred", DataType::PRED, 1, Map::kUint8},         {"s8", DataType::S8, 1, Map::kUint8},
    {"s16", DataType::S16, 2, Map::kUint16},          {"s32", DataType::S32, 4, Map::kInt32},
    {"s64", DataType::S64, 8, Map::kInt64},           {"u8", DataType::U8, 1, Map::kUint8},
    {"u16", DataType::U16, 2, Map::kUint16},          {"u32", DataType::U32, 4, Map::kUint32},
    {"u64", DataType::U64, 8, Map::kUint64},
};

}  // namespace

const Dtype* FindDtype(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

std::string DtypeName(ffi::DataType type) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.type == type) return std::string(dtype.name);
  }
  return Concat("XLA element type ", static_cast<int>(type));
}

std::string DtypeNames() {
  std::string names;
  for (const Dtype& dtype : kDtypes) names += Concat(names.empty() ? "" : ", ", dtype.name);
  return names;
}

}  // namespace jax_flash
