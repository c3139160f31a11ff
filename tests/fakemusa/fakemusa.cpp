// An asynchronous CPU-only PrivateUse1 device, renamed "musa" by fakemusa.py: torch's real device path
// without the card. Streams are worker threads, events are (stream, ticket) snapshots, copies are tasks
// that hold raw pointers only (like a DMA engine), freed memory is poisoned in the order of the stream it
// came from, and device pointers fault when a processor follows them.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>

namespace {
constexpr int kDevs = 2;
constexpr auto PU1 = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> g_fixed_us{0}, g_us_per_mib{0}, g_jitter_us{0};
std::atomic<bool> g_dead{false};  // sticky, like the error of a failed kernel
void alive() { TORCH_CHECK(!g_dead, "fake musa: an illegal memory access was encountered"); }

struct Q {  // one stream
  int dev;
  int64_t id;
  std::mutex m;
  std::condition_variable work, prog;
  std::deque<std::function<void()>> q;
  uint64_t pushed = 0, done = 0;
  Q(int d, int64_t i) : dev(d), id(i) {
    std::thread([this] {
      for (;;) {
        std::function<void()> f;
        {
          std::unique_lock<std::mutex> l(m);
          work.wait(l, [&] { return !q.empty(); });
          f = std::move(q.front());
          q.pop_front();
        }
        f();
        {
          std::lock_guard<std::mutex> l(m);
          ++done;
        }
        prog.notify_all();
      }
    }).detach();
  }
  uint64_t push(std::function<void()> f) {
    uint64_t t;
    {
      std::lock_guard<std::mutex> l(m);
      q.push_back(std::move(f));
      t = ++pushed;
    }
    work.notify_one();
    return t;
  }
  uint64_t tail() {
    std::lock_guard<std::mutex> l(m);
    return pushed;
  }
  bool ready(uint64_t t) {
    std::lock_guard<std::mutex> l(m);
    return done >= t;
  }
  void wait(uint64_t t) {
    std::unique_lock<std::mutex> l(m);
    prog.wait(l, [&] { return done >= t; });
  }
};
struct Ev {
  std::mutex m;
  Q* q = nullptr;
  uint64_t t = 0;
  std::shared_ptr<std::atomic<int64_t>> ns;
};

std::mutex g_m;
std::vector<std::vector<Q*>> g_streams(kDevs);
thread_local int t_dev = 0;
thread_local int64_t t_cur[kDevs] = {0, 0};
Q* stream(int d, int64_t id) {
  std::lock_guard<std::mutex> l(g_m);
  auto& v = g_streams[d];
  if (v.empty()) v.push_back(new Q(d, 0));
  return v.at(id);
}
Q* cur(int d) { return stream(d, t_cur[d]); }
Q* of(const c10::Stream& s) { return stream(s.device_index() < 0 ? t_dev : s.device_index(), s.id()); }
void syncdev(int d) {
  std::vector<Q*> v;
  {
    std::lock_guard<std::mutex> l(g_m);
    v = g_streams[d];
  }
  for (auto* q : v) q->wait(q->tail());
}

// ---- memory -------------------------------------------------------------------------------------
struct Blk {
  size_t n;
  int dev;
  Q* home;
  std::vector<std::pair<Q*, uint64_t>> used;
};
// Device pointers handed out carry bit 62: a CPU dereference faults, pointer arithmetic still works.
constexpr uintptr_t TAG = uintptr_t(1) << 62;
char* raw(const void* p) { return (char*)((uintptr_t)p & ~TAG); }
void* tag(void* p) { return p ? (void*)((uintptr_t)p | TAG) : p; }
std::mutex g_mm;
std::map<char*, Blk> g_blk;
std::vector<std::pair<char*, Blk>> g_pending;
std::map<char*, size_t> g_pin, g_registered;
size_t g_alloc[kDevs] = {0, 0}, g_peak[kDevs] = {0, 0};
size_t g_total = size_t(1) << 30;
void reclaim_locked() {
  for (size_t i = 0; i < g_pending.size();) {
    auto& [p, b] = g_pending[i];
    bool ok = true;
    for (auto& [q, t] : b.used) ok = ok && q->ready(t);
    if (!ok) {
      ++i;
      continue;
    }
    char* pp = p;
    size_t n = b.n;
    b.home->push(
        [pp, n] { memset(pp, 0xDD, n); });  // "someone else got this block" (never unmapped: quarantine)
    g_pending.erase(g_pending.begin() + i);
  }
}
void dev_free(void* v) {
  if (!v) return;
  std::lock_guard<std::mutex> l(g_mm);
  auto it = g_blk.find(raw(v));
  if (it == g_blk.end()) return;
  g_alloc[it->second.dev] -= it->second.n;
  g_pending.emplace_back(it->first, it->second);
  g_blk.erase(it);
  reclaim_locked();
}
struct DevAlloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    int d = t_dev;
    void* p = nullptr;
    if (n) {
      std::lock_guard<std::mutex> l(g_mm);
      reclaim_locked();
      TORCH_CHECK_WITH(OutOfMemoryError, g_alloc[d] + n <= g_total, "fake musa out of memory");
      if (posix_memalign(&p, 4096, n)) TORCH_CHECK(false, "host oom");
      g_blk[(char*)p] = Blk{n, d, cur(d), {}};
      g_alloc[d] += n;
      g_peak[d] = std::max(g_peak[d], g_alloc[d]);
    }
    p = tag(p);
    return {p, p, &dev_free, c10::Device(PU1, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &dev_free; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(raw(d), raw(s), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    Q* q = of(s);
    uint64_t t = q->tail();
    std::lock_guard<std::mutex> l(g_mm);
    auto it = g_blk.find(raw(p.get()));
    if (it != g_blk.end()) it->second.used.emplace_back(q, t);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats st;
    std::lock_guard<std::mutex> l(g_mm);
    for (auto* a : {&st.allocated_bytes, &st.reserved_bytes}) {
      (*a)[0].current = g_alloc[d];
      (*a)[0].peak = g_peak[d];
    }
    return st;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mm);
    g_peak[d] = g_alloc[d];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mm);
    return {g_total - g_alloc[d], g_total};
  }
} g_dev_alloc;
void pin_free(void* v) {
  std::lock_guard<std::mutex> l(g_mm);
  g_pin.erase((char*)v); /* quarantine: never reused */
}
struct PinAlloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) {
      if (posix_memalign(&p, 4096, n)) TORCH_CHECK(false, "host oom");
      std::lock_guard<std::mutex> l(g_mm);
      g_pin[(char*)p] = n;
    }
    return {p, p, &pin_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pin_free; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
} g_pin_alloc;
size_t g_most_pinned = size_t(1) << 40;
bool within(const std::map<char*, size_t>& ranges, char* p,
            size_t n) {  // inside ONE of them, as the card wants it
  auto it = ranges.upper_bound(p);
  if (it == ranges.begin()) return false;
  --it;
  return p + n <= it->first + it->second;
}
bool pinned(const void* v, size_t n = 1) {
  std::lock_guard<std::mutex> l(g_mm);
  return within(g_pin, (char*)v, n) || within(g_registered, (char*)v, n);
}
// As the driver's host registration: whole ranges, none twice. 0 is success.
int host_register(uintptr_t at, size_t n) {
  char* p = (char*)at;
  std::lock_guard<std::mutex> l(g_mm);
  size_t all = n;
  for (auto& [q, m] : g_registered) {
    if (p < q + m && q < p + n) return 712;  // already mapped
    all += m;
  }
  if (all > g_most_pinned) return 2;  // out of memory
  g_registered[p] = n;
  return 0;
}
int host_unregister(uintptr_t at) {
  for (int d = 0; d < kDevs; ++d) syncdev(d);
  std::lock_guard<std::mutex> l(g_mm);
  return g_registered.erase((char*)at) ? 0 : 713;
}
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_dev_alloc);

// ---- guard + hooks ------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = PU1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return PU1; }
  c10::Device getDevice() const override { return {PU1, (c10::DeviceIndex)t_dev}; }
  void setDevice(c10::Device d) const override {
    if (d.index() >= 0) t_dev = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) t_dev = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto o = getDevice();
    setDevice(d);
    return o;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevs; }
  c10::Device full(c10::Device d) const { return d.index() < 0 ? getDevice() : d; }
  c10::Stream mk(c10::Device d, int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, full(d), id); }
  c10::Stream getStream(c10::Device d) const override { return mk(d, t_cur[full(d).index()]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return mk(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    int i = full(d).index();
    stream(i, 0);
    std::lock_guard<std::mutex> l(g_m);
    auto& v = g_streams[i];
    v.push_back(new Q(i, v.size()));
    return mk(d, v.size() - 1);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto o = getStream(s.device());
    t_cur[full(s.device()).index()] = s.id();
    return o;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return of(s); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new Ev;
    auto* ev = (Ev*)*e;
    auto ns = std::make_shared<std::atomic<int64_t>>(0);
    Q* q = of(s);
    uint64_t t = q->push([ns] { ns->store(std::chrono::steady_clock::now().time_since_epoch().count()); });
    std::lock_guard<std::mutex> l(ev->m);
    ev->q = q;
    ev->t = t;
    ev->ns = ns;
  }
  static std::pair<Q*, uint64_t> snap(void* e) {
    auto* ev = (Ev*)e;
    std::lock_guard<std::mutex> l(ev->m);
    return {ev->q, ev->t};
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e) return;
    auto [q, t] = snap(e);
    if (q) of(s)->push([q, t] { q->wait(t); });
  }
  bool queryEvent(void* e) const override {
    alive();
    if (!e) return true;
    auto [q, t] = snap(e);
    return !q || q->ready(t);
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    auto [q, t] = snap(e);
    if (q) q->wait(t);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Ev*)e; }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (((Ev*)b)->ns->load() - ((Ev*)a)->ns->load()) / 1e6;
  }
  bool queryStream(const c10::Stream& s) const override {
    Q* q = of(s);
    return q->ready(q->tail());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Q* q = of(s);
    q->wait(q->tail());
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override { syncdev(d < 0 ? t_dev : d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    g_dev_alloc.recordStream(p, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevs; }
  c10::DeviceIndex getCurrentDevice() const override { return t_dev; }
  void setCurrentDevice(c10::DeviceIndex d) const override { t_dev = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto o = t_dev;
    t_dev = d;
    return o;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pin_alloc; }
};

// ---- operators ----------------------------------------------------------------------------------
at::Tensor empty_mf(c10::IntArrayRef s, std::optional<at::ScalarType> dt, std::optional<at::Layout>,
                    std::optional<at::Device> d, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  c10::DeviceGuard g(c10::device_or_default(d));
  return at::detail::empty_generic(s, &g_dev_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dt), mf);
}
at::Tensor empty_st(c10::IntArrayRef s, c10::IntArrayRef st, std::optional<at::ScalarType> dt,
                    std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>) {
  c10::DeviceGuard g(c10::device_or_default(d));
  return at::detail::empty_strided_generic(
      s, st, &g_dev_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt));
}
void delay(size_t n) {
  thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  int64_t us = g_fixed_us + (int64_t)((double)n / (1 << 20) * g_us_per_mib);
  if (int64_t most = g_jitter_us) us += random() % most;
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool nb) {
  alive();
  bool sd = src.device().type() == PU1, dd = dst.device().type() == PU1;
  if (sd && dd && src.device() != dst.device()) g_dead = true;  // no peer access here
  alive();
  int dev =
      sd ? src.device().index() : dst.device().index();  // D2D across devices: source's stream (as CUDA)
  Q* q = cur(dev);
  auto srcx = src.expand_as(dst);
  void* sp = raw(srcx.data_ptr());
  void* dp = raw(dst.data_ptr());
  size_t n = dst.nbytes();
  if (!dst.numel()) return dst;
  bool plain = srcx.is_contiguous() && dst.is_contiguous() && src.scalar_type() == dst.scalar_type();
  auto ss = srcx.sizes().vec(), sst = srcx.strides().vec(), ds = dst.sizes().vec(),
       dst_st = dst.strides().vec();
  auto sdt = src.scalar_type(), ddt = dst.scalar_type();
  uint64_t t = q->push([=] {
    delay(n);
    if (plain) {
      memcpy(dp, sp, n);
      return;
    }
    at::NoGradGuard ng;
    auto a = at::from_blob(sp, ss, sst, at::TensorOptions(sdt));
    auto b = at::from_blob(dp, ds, dst_st, at::TensorOptions(ddt));
    b.copy_(a);
  });
  bool pageable = (!sd && !pinned(sp, n)) || (!dd && !pinned(dp, n));
  if (!nb || pageable) q->wait(t);
  return dst;
}
at::Tensor copy_from_resize(const at::Tensor& s, const at::Tensor& d) {
  at::native::resize_(d, s.sizes(), std::nullopt);
  return copy_from(s, d, false);
}
at::Scalar lsd(const at::Tensor& t) {
  Q* q = cur(t.device().index());
  q->wait(q->tail());
  return at::from_blob(raw(t.data_ptr()), {}, at::TensorOptions(t.scalar_type())).item();
}
at::Tensor as_str(const at::Tensor& s, c10::IntArrayRef sz, c10::IntArrayRef st, std::optional<int64_t> off) {
  return at::native::as_strided_tensorimpl(s, sz, st, off);
}
at::Tensor vw(const at::Tensor& s, c10::IntArrayRef sz) { return at::native::view(s, sz); }
at::Tensor ralias(const at::Tensor& s, c10::IntArrayRef sz, c10::IntArrayRef st) {
  return at::native::_reshape_alias(s, sz, st);
}
void rec_stream(at::Tensor& t, c10::Stream s) { g_dev_alloc.recordStream(t.storage().data_ptr(), s); }
// Kernels that the real card lacks: kvferry must not need them.
void refuse(const c10::OperatorHandle& op, const torch::jit::Stack* st) {
  const std::string& name = op.schema().name();
  if (name == "aten::_to_copy" || name == "aten::fill_.Scalar" || name == "aten::fill_") return;
  for (auto& v : *st) {
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    auto t = v.toTensor().scalar_type();
    bool small = t == at::kByte || t == at::kFloat8_e4m3fn || t == at::kFloat8_e5m2;
    TORCH_CHECK(!small, "fake musa: ", name, " is not supported for ", t);
  }
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* st) {
  refuse(op, st);
  at::native::cpu_fallback(op, st);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_st);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_resize);
  m.impl("_local_scalar_dense", lsd);
  m.impl("as_strided", as_str);
  m.impl("view", vw);
  m.impl("_reshape_alias", ralias);
  m.impl("record_stream", rec_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

void kernel(const at::Tensor& t, int64_t byte,
            int64_t us) {  // stand-in for an attention kernel: takes `us`, then writes
  TORCH_CHECK(t.device().type() == PU1 && t.is_contiguous());
  void* p = raw(t.data_ptr());
  size_t n = t.nbytes();
  cur(t.device().index())->push([=] {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    memset(p, (int)byte, n);
  });
}
std::mutex g_gate;
std::condition_variable g_opened;
int64_t g_gates_open = 0, g_gates = 0;  // a gate is a number; those up to the first are open
int64_t gate() {  // the current stream stands still here, for a minute at most
  int64_t number;
  {
    std::lock_guard<std::mutex> l(g_gate);
    number = ++g_gates;
  }
  cur(t_dev)->push([number] {
    std::unique_lock<std::mutex> l(g_gate);
    g_opened.wait_for(l, std::chrono::minutes(1), [number] { return g_gates_open >= number; });
  });
  return number;
}
void open_gates(int64_t number) {
  {
    std::lock_guard<std::mutex> l(g_gate);
    g_gates_open = std::max(g_gates_open, number);
  }
  g_opened.notify_all();
}
}  // namespace
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks* h = new Hooks;
  at::RegisterPrivateUse1HooksInterface(h);
  m.def("kernel", &kernel, py::call_guard<py::gil_scoped_release>());
  m.def("gate", &gate);
  m.def("open_gates", &open_gates);
  m.def("set_latency", [](int64_t f, int64_t u) {
    g_fixed_us = f;
    g_us_per_mib = u;
  });
  m.def("set_jitter", [](int64_t most) { g_jitter_us = most; });
  m.def("set_total", [](size_t n) { g_total = n; });
  m.def("set_most_pinned", [](size_t n) { g_most_pinned = n; });
  m.def("kill", [](bool dead) { g_dead = dead; });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister, py::call_guard<py::gil_scoped_release>());
  m.def("get_device", [] { return t_dev; });
  m.def("set_device", [](int d) { t_dev = d; });
  m.def("device_count", [] { return kDevs; });
  m.def("synchronize", [](int d) {
    py::gil_scoped_release r;
    syncdev(d < 0 ? t_dev : d);
  });
  m.def("mem_info", [](int d) { return g_dev_alloc.getMemoryInfo(d); });
}
