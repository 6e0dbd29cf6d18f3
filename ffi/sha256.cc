#include "ffi/sha256.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jax_flash {
namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, section 4.2.2: fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t RotateRight(uint32_t word, int count) {
  return (word >> count) | (word << (32 - count));
}

// Section 6.2.2: folds one block into the hash value.
void Compress(const unsigned char* block, std::array<uint32_t, 8>* hash) {
  std::array<uint32_t, 64> schedule;
  for (size_t t = 0; t < 16; ++t) {
    schedule[t] = uint32_t{block[4 * t]} << 24 | uint32_t{block[4 * t + 1]} << 16 |
                  uint32_t{block[4 * t + 2]} << 8 | uint32_t{block[4 * t + 3]};
  }
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t w15 = schedule[t - 15];
    const uint32_t w2 = schedule[t - 2];
    const uint32_t sigma0 = RotateRight(w15, 7) ^ RotateRight(w15, 18) ^ (w15 >> 3);
    const uint32_t sigma1 = RotateRight(w2, 17) ^ RotateRight(w2, 19) ^ (w2 >> 10);
    schedule[t] = sigma1 + schedule[t - 7] + sigma0 + schedule[t - 16];
  }

  auto [a, b, c, d, e, f, g, h] = *hash;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = RotateRight(e, 6) ^ RotateRight(e, 11) ^ RotateRight(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t temporary1 = h + sum1 + choice + kRoundConstants[t] + schedule[t];
    const uint32_t sum0 = RotateRight(a, 2) ^ RotateRight(a, 13) ^ RotateRight(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + temporary1;
    d = c;
    c = b;
    b = a;
    a = temporary1 + sum0 + majority;
  }
  const std::array<uint32_t, 8> working = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) (*hash)[i] += working[i];
}

}  // namespace

std::string Sha256Hex(std::string_view bytes) {
  // Section 5.3.3: fractional parts of the square roots of the first 8 primes.
  std::array<uint32_t, 8> hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t done = 0;
  for (; done + kBlockBytes <= bytes.size(); done += kBlockBytes) Compress(data + done, &hash);

  // Section 5.1.1: a one bit, zeros, and the length in bits end the last block; they take a block
  // of their own when fewer than 9 bytes are left in it.
  std::array<unsigned char, 2 * kBlockBytes> tail{};
  const size_t rest = bytes.size() - done;
  if (rest > 0) std::memcpy(tail.data(), data + done, rest);
  tail[rest] = 0x80;
  const size_t tail_bytes = rest + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (size_t i = 0; i < 8; ++i) {
    tail[tail_bytes - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
  }
  for (size_t at = 0; at < tail_bytes; at += kBlockBytes) Compress(tail.data() + at, &hash);

  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint32_t word : hash) {
    for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[(word >> shift) & 15];
  }
  return text;
}

}  // namespace jax_flash
