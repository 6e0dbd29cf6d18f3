// The functions that XLA calls.

#ifndef JAX_FLASH_FFI_HANDLERS_H_
#define JAX_FLASH_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

// Forward and backward targets share these: all that differs is in the attributes (see call.h).
extern "C" {

// Before an execution, without a stream: loads the kernels, on the device, where that is yet to be
// done. XLA lets all devices finish this stage before any goes on, so a load, which can wait for
// the device, never meets a running collective.
XLA_FFI_Error* JaxFlashPrepare(XLA_FFI_CallFrame* call_frame);

// Launches the call's kernels on XLA's stream, in order. May be captured into a CUDA graph.
XLA_FFI_Error* JaxFlashExecute(XLA_FFI_CallFrame* call_frame);

#ifdef JAX_FLASH_TESTING
// JaxFlashExecute for XLA's CPU backend, with device 0 and a made-up stream: lets tests look at
// what a compiled program launches, on a fake driver.
XLA_FFI_Error* JaxFlashExecuteOnCpu(XLA_FFI_CallFrame* call_frame);
#endif
}

#endif  // JAX_FLASH_FFI_HANDLERS_H_
