// A small test harness: TEST defines a test, CHECK* report a failure and go on, and the main
// function in check.cc runs every test of the program.

#ifndef JAX_FLASH_FFI_TESTS_CHECK_H_
#define JAX_FLASH_FFI_TESTS_CHECK_H_

#include <sstream>
#include <string>
#include <string_view>

namespace jax_flash::testing {

// Registers a test; runs before main.
bool AddTest(const char* name, void (*body)());

void Fail(const char* file, int line, const std::string& text);

template <typename T>
std::string Show(const T& value) {
  std::ostringstream text;
  text << std::boolalpha << value;
  return text.str();
}

template <typename Actual, typename Expected>
void CheckEqual(const Actual& actual, const Expected& expected, const char* expression,
                const char* file, int line) {
  if (actual == expected) return;
  Fail(
      file, line,
      std::string(expression) + " is\n    " + Show(actual) + "\n  expected\n    " + Show(expected));
}

inline void CheckContains(std::string_view text, std::string_view part, const char* expression,
                          const char* file, int line) {
  if (text.find(part) != std::string_view::npos) return;
  Fail(file, line,
       std::string(expression) + " is\n    " + Show(text) + "\n  and lacks\n    " + Show(part));
}

}  // namespace jax_flash::testing

#define TEST(name)                                                             \
  static void name();                                                          \
  static const bool name##_added = ::jax_flash::testing::AddTest(#name, name); \
  static void name()

#define CHECK(condition) \
  if (!(condition)) ::jax_flash::testing::Fail(__FILE__, __LINE__, #condition " is false")

#define CHECK_EQ(actual, expected) \
  ::jax_flash::testing::CheckEqual(actual, expected, #actual, __FILE__, __LINE__)

#define CHECK_CONTAINS(text, part) \
  ::jax_flash::testing::CheckContains(text, part, #text, __FILE__, __LINE__)

#endif  // JAX_FLASH_FFI_TESTS_CHECK_H_
