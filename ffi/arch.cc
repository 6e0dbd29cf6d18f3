#include "ffi/arch.h"

namespace jax_flash {

std::optional<Arch> Arch::Parse(std::string_view name) {
  constexpr std::string_view kPrefix = "sm_";
  if (name.substr(0, kPrefix.size()) != kPrefix) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  char suffix = '\0';
  if (!name.empty() && (name.back() == 'a' || name.back() == 'f')) {
    suffix = name.back();
    name.remove_suffix(1);
  }
  if (name.size() < 2 || name.size() > 4) return std::nullopt;
  int number = 0;
  for (const char digit : name) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + (digit - '0');
  }
  return Arch{number / 10, number % 10, suffix};
}

bool Arch::RunsOn(int device_major, int device_minor) const {
  if (device_major != major) return false;
  return suffix == 'a' ? device_minor == minor : device_minor >= minor;
}

}  // namespace jax_flash
