// What a torch that was built without CUDA lacks to believe in a CUDA device: a device guard and that type's hooks.
// There is one device. Its streams are numbers, and all that could be waited for is over.
// It is loaded before torch's Python module, which asks for the hooks once and remembers the answer.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
thread_local c10::StreamId current_stream = 0;

struct PretendedGuard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(kDevice);
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  // The autograd engine records and waits for events; any address but null stands for one.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &current_stream;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);
}

namespace at {

// The registry finds the hooks by this class name.
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
