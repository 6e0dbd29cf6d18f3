// Many threads at once. Meant for the thread sanitizer too.

#include <atomic>
#include <thread>
#include <vector>

#include "ffi/kernel_table.h"
#include "ffi/tests/check.h"
#include "ffi/tests/fixture.h"

namespace jax_flash::testing {
namespace {

constexpr int kThreads = 16;

void RunInThreads(const std::function<void(int)>& body) {
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (--waiting; waiting > 0;) std::this_thread::yield();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(OneLoadHoweverManyThreads) {
  const Invocation call = ForwardCall(Add(ForwardSpec("threads")));
  TakeLog();
  std::atomic<int> failures{0};
  RunInThreads([&](int i) {
    const int device = i % kFakeDevices;
    if (!call.Prepare(device).ok() || !call.Execute(device).ok()) ++failures;
  });
  CHECK_EQ(failures.load(), 0);
  const std::vector<std::string> log = TakeLog();
  CHECK_EQ(CountCalls(log, "cuLibraryLoadData"), size_t{1});
  CHECK_EQ(CountCalls(log, "cuKernelGetFunction"), size_t{kFakeDevices});
  CHECK_EQ(CountCalls(log, "cuLaunchKernelEx"), size_t{kThreads});
}

TEST(AFailureIsTheSameForEveryThread) {
  KernelSpec spec = ForwardSpec("failing");
  spec.path += ".gone";
  const Invocation call = ForwardCall(Add(spec));
  std::vector<std::string> messages(kThreads);
  RunInThreads([&](int i) { messages[i] = call.Prepare(0).message; });
  for (const std::string& message : messages) CHECK_EQ(message, messages[0]);
  CHECK_CONTAINS(messages[0], "cannot open cubin");
}

TEST(KernelsAreAddedWhileOthersAreFound) {
  KernelTable table;
  KernelSpec spec = ForwardSpec("added");
  std::atomic<int> wrong{0};
  RunInThreads([&](int i) {
    KernelSpec mine = spec;
    for (int j = 0; j < 100; ++j) {
      // Every name is added by two threads.
      mine.name = Concat("sm_90a/", i / 2, "_", j);
      if (!table.Add(mine).empty() || table.Find(mine.name) == nullptr) ++wrong;
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(table.Names().size(), size_t{kThreads / 2 * 100});
}

}  // namespace
}  // namespace jax_flash::testing
