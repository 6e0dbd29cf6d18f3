#include "ffi/tests/call_frame.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "ffi/handlers.h"
#include "ffi/tests/fake_cuda.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace jax_flash::testing {
namespace {

namespace ffi = ::xla::ffi;

// Buffers that a test gives no address are this far apart, aligned as XLA aligns. Nothing reads
// them.
constexpr uintptr_t kFirstAddress = 0x7f0000000000;
constexpr uintptr_t kAddressStep = 0x100000000;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}

void DeleteError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

// What an execution context is, is up to the implementation of the API: here, a device's number.
int DeviceOf(const XLA_FFI_ExecutionContext* context) {
  return *reinterpret_cast<const int*>(context);
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(kFakeStreams + DeviceOf(args->ctx));
  return nullptr;
}

XLA_FFI_Error* GetDeviceOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = DeviceOf(args->ctx);
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = DeleteError;
  api.XLA_FFI_Stream_Get = GetStream;
  api.XLA_FFI_DeviceOrdinal_Get = GetDeviceOrdinal;
  return api;
}

// Attributes in the C layout, sorted by name. Refers to the map that it is made from.
class EncodedAttributes {
 public:
  explicit EncodedAttributes(const std::map<std::string, Attribute>& attributes) {
    const size_t count = attributes.size();
    names_.reserve(count);
    strings_.reserve(count);
    scalars_.reserve(count);
    for (const auto& [name, attribute] : attributes) {
      names_.push_back({name.data(), name.size()});
      name_pointers_.push_back(&names_.back());
      if (const auto* text = std::get_if<std::string>(&attribute)) {
        strings_.push_back({text->data(), text->size()});
        types_.push_back(XLA_FFI_AttrType_STRING);
        values_.push_back(&strings_.back());
      } else {
        scalars_.push_back(Scalar(attribute));
        types_.push_back(XLA_FFI_AttrType_SCALAR);
        values_.push_back(&scalars_.back());
      }
    }
  }

  XLA_FFI_Attrs attrs() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(types_.size()),
            types_.data(),
            name_pointers_.data(),
            values_.data()};
  }

 private:
  static XLA_FFI_Scalar Scalar(const Attribute& attribute) {
    const auto scalar = [](XLA_FFI_DataType type, const auto& value) {
      return XLA_FFI_Scalar{type, const_cast<void*>(static_cast<const void*>(&value))};
    };
    if (const auto* i = std::get_if<int32_t>(&attribute)) return scalar(XLA_FFI_DataType_S32, *i);
    if (const auto* i = std::get_if<int64_t>(&attribute)) return scalar(XLA_FFI_DataType_S64, *i);
    if (const auto* f = std::get_if<float>(&attribute)) return scalar(XLA_FFI_DataType_F32, *f);
    return scalar(XLA_FFI_DataType_F64, std::get<double>(attribute));
  }

  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_ByteSpan> strings_;
  std::vector<XLA_FFI_Scalar> scalars_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
};

template <typename Buffers>
std::string JoinNames(const Buffers& buffers) {
  std::string names;
  for (const auto& buffer : buffers) names += (names.empty() ? "" : ",") + buffer.name;
  return names;
}

template <typename Buffers>
std::vector<XLA_FFI_Buffer> EncodeBuffers(const Buffers& buffers) {
  std::vector<XLA_FFI_Buffer> encoded;
  for (const auto& buffer : buffers) {
    encoded.push_back(
        {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(buffer.type),
         reinterpret_cast<void*>(buffer.address), static_cast<int64_t>(buffer.shape.size()),
         const_cast<int64_t*>(buffer.shape.data())});
  }
  return encoded;
}

std::vector<void*> Pointers(std::vector<XLA_FFI_Buffer>& buffers) {
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  return pointers;
}

}  // namespace

Invocation::Invocation() = default;

Invocation& Invocation::Operand(const std::string& name, ffi::DataType type,
                                std::vector<int64_t> shape, uintptr_t address) {
  operands_.push_back({name, type, std::move(shape), AddressOrDefault(address)});
  return *this;
}

Invocation& Invocation::Result(const std::string& name, ffi::DataType type,
                               std::vector<int64_t> shape, uintptr_t address) {
  results_.push_back({name, type, std::move(shape), AddressOrDefault(address)});
  return *this;
}

Invocation& Invocation::Set(const std::string& name, Attribute value) {
  attributes_.insert_or_assign(name, std::move(value));
  return *this;
}

Invocation& Invocation::Unset(const std::string& name) {
  unset_.push_back(name);
  return *this;
}

Outcome Invocation::Prepare(int device) const {
  return Run(JaxFlashPrepare, XLA_FFI_ExecutionStage_PREPARE, device);
}

Outcome Invocation::Execute(int device) const {
  return Run(JaxFlashExecute, XLA_FFI_ExecutionStage_EXECUTE, device);
}

uintptr_t Invocation::Address(const std::string& name) const {
  for (const auto* buffers : {&operands_, &results_}) {
    for (const Buffer& buffer : *buffers) {
      if (buffer.name == name) return buffer.address;
    }
  }
  return 0;
}

uintptr_t Invocation::AddressOrDefault(uintptr_t address) const {
  if (address != 0) return address;
  return kFirstAddress + kAddressStep * (operands_.size() + results_.size());
}

Outcome Invocation::Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, int device) const {
  static const XLA_FFI_Api api = MakeApi();
  std::map<std::string, Attribute> attributes = attributes_;
  attributes.try_emplace("version", int32_t{1});
  attributes.try_emplace("operands", JoinNames(operands_));
  attributes.try_emplace("results", JoinNames(results_));
  for (const std::string& name : unset_) attributes.erase(name);
  EncodedAttributes encoded_attributes(attributes);

  std::vector<XLA_FFI_Buffer> operands = EncodeBuffers(operands_);
  std::vector<XLA_FFI_Buffer> results = EncodeBuffers(results_);
  std::vector<void*> operand_pointers = Pointers(operands);
  std::vector<void*> result_pointers = Pointers(results);
  std::vector<XLA_FFI_ArgType> operand_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&device);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()),
                operand_types.data(), operand_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                result_types.data(), result_pointers.data()};
  frame.attrs = encoded_attributes.attrs();
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error == nullptr ? Outcome{} : Outcome{error->code, error->message};
}

}  // namespace jax_flash::testing
