#include "ffi/kernel_table.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace jax_flash {

KernelTable::~KernelTable() {
  for (std::atomic<Node*>& bucket : buckets_) {
    for (Node* node = bucket.load(); node != nullptr;) delete std::exchange(node, node->next);
  }
}

KernelTable& KernelTable::Get() {
  // Never destroyed: another thread may still be running a call when the process ends.
  static KernelTable& table = *new KernelTable;
  return table;
}

std::string KernelTable::Add(KernelSpec spec) {
  if (std::string problem = Validate(spec); !problem.empty()) {
    return Concat("kernel ", spec.name, ": ", problem);
  }
  const std::lock_guard lock(add_mutex_);
  if (const Kernel* present = Find(spec.name)) {
    if (present->spec() == spec) return "";
    return Concat("kernel ", spec.name, " was already added with different content, from ",
                  present->spec().path, "; restart Python to use that of ", spec.path);
  }
  std::atomic<Node*>& bucket = buckets_[Bucket(spec.name)];
  Node* head = bucket.load(std::memory_order_relaxed);
  bucket.store(new Node{Kernel(std::move(spec)), head}, std::memory_order_release);
  return "";
}

Kernel* KernelTable::Find(std::string_view name) const {
  Node* node = buckets_[Bucket(name)].load(std::memory_order_acquire);
  while (node != nullptr && node->kernel.spec().name != name) node = node->next;
  return node == nullptr ? nullptr : &node->kernel;
}

std::vector<std::string> KernelTable::Names() const {
  std::vector<std::string> names;
  for (const std::atomic<Node*>& bucket : buckets_) {
    for (Node* node = bucket.load(std::memory_order_acquire); node != nullptr; node = node->next) {
      names.push_back(node->kernel.spec().name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

size_t KernelTable::Bucket(std::string_view name) {
  return std::hash<std::string_view>{}(name) % kBuckets;
}

}  // namespace jax_flash
