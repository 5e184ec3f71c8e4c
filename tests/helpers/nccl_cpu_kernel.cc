// A CPU kernel for TensorFlow's op NcclAllReduce, for tests only.
//
// TensorFlow declares NcclAllReduce on every machine but ships a kernel for GPUs alone. With this
// one a test runs the very ops that a GPU would run, on virtual CPU devices, and meets the same
// demand: each device of a pack has to run its op, and none gets its result before all have come.
// Where NCCL would hang or mix up memory, this kernel fails, and says why.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace tfcdo {
namespace {

namespace tf = ::tensorflow;
using Clock = std::chrono::steady_clock;
using Device = tf::DeviceNameUtils::ParsedName;  // Ordered by number: CPU:2 before CPU:10.

constexpr char kTimeoutVariable[] = "TFCDO_NCCL_CPU_TIMEOUT_S";
constexpr double kDefaultTimeoutSeconds = 30;
constexpr std::chrono::milliseconds kWatchdogPeriod(20);

// Which ops belong together: step, loop frame, iteration, shared_name. A step is one Session.run or
// one call of a function, with the functions inlined into it; iterations of a loop overlap.
using Key = std::tuple<int64_t, uint64_t, int64_t, std::string>;

// One op that runs now. `ctx` and its cancellation manager live until `done` is called.
struct Participant {
  tf::OpKernelContext* ctx;
  tf::AsyncOpKernel::DoneCallback done;
  tf::Tensor* output;
  tf::CancellationToken token = tf::CancellationManager::kInvalidToken;

  const Device& device() const { return ctx->device()->parsed_name(); }
};

// The participants of one key that have come so far. A map, so that they are reduced in the order
// of the devices, not in that in which the threads happened to come: results repeat bit for bit.
struct Gathering {
  int64_t serial;       // Never used twice, whereas a key is: by a second call in the same step.
  std::string title;    // How error messages begin.
  std::string request;  // What is asked for, in words; all participants have to ask for the same.
  size_t num_devices;
  std::chrono::duration<double> timeout;
  Clock::time_point deadline;
  std::map<Device, Participant> participants;

  std::string WhoCame() const {
    std::string names;
    for (const auto& [device, participant] : participants) {
      absl::StrAppend(&names, names.empty() ? "" : ", ", device.type, ":", device.id);
    }
    return absl::StrCat(participants.size(), " of ", num_devices, " devices came: ", names);
  }
};

void Finish(Participant& participant, const absl::Status& status) {
  // Do not wait for a callback that already runs (a deadlock, if this is called from one): it will
  // not find its gathering among the pending ones, and do nothing.
  if (participant.token != tf::CancellationManager::kInvalidToken) {
    participant.ctx->cancellation_manager()->TryDeregisterCallback(participant.token);
  }
  if (!status.ok()) participant.ctx->SetStatus(status);
  const auto done = std::move(participant.done);
  done();  // From here on `participant.ctx` may be gone.
}

void FinishAll(Gathering& gathering, const absl::Status& status) {
  for (auto& [device, participant] : gathering.participants) Finish(participant, status);
}

// Brings the participants of each key together. The thread that takes a gathering out of `pending_` owns it
// and alone finishes it; nothing of it stays behind, so that a later step starts afresh.
class Rendezvous {
 public:
  Rendezvous() { std::thread([this] { Watch(); }).detach(); }

  // Adds a participant to the gathering of its key (`fresh` if there is none) and returns at once:
  // with the whole gathering if it was the last to come, else with nothing. It then waits, which
  // takes no thread, or has been told of an error.
  std::unique_ptr<Gathering> Join(const Key& key, Gathering fresh, Participant newcomer) {
    std::unique_ptr<Gathering> taken;
    absl::Status status;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto entry = pending_.find(key);
      const std::string request = fresh.request;
      if (entry == pending_.end()) {
        fresh.serial = next_serial_++;
        fresh.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(fresh.timeout);
        entry = pending_.emplace(key, std::make_unique<Gathering>(std::move(fresh))).first;
      }
      Gathering& gathering = *entry->second;
      status = Admit(key, gathering, request, newcomer);
      if (status.ok()) gathering.participants.emplace(newcomer.device(), std::move(newcomer));
      const bool is_complete = gathering.participants.size() == gathering.num_devices;
      if (!status.ok() || is_complete) taken = Take(entry);
    }
    if (status.ok()) return taken;
    FinishAll(*taken, status);
    Finish(newcomer, status);
    return nullptr;
  }

 private:
  using Pending = std::map<Key, std::unique_ptr<Gathering>>;

  // Whether the newcomer fits those who are there; if it does, it can be cancelled from now on.
  absl::Status Admit(const Key& key, const Gathering& gathering, const std::string& request,
                     Participant& newcomer) {
    const Device& device = newcomer.device();
    const std::string who = absl::StrCat(gathering.title, device.type, ":", device.id);
    if (request != gathering.request) {
      return absl::InvalidArgumentError(absl::StrCat(
          who, " asks for the ", request, ", the others for the ", gathering.request, "; ",
          gathering.WhoCame(), "."));
    }
    if (gathering.participants.count(device) > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          who, " came twice; ", gathering.WhoCame(), ". Does another op or a second call of this ",
          "function in the same step have the same shared_name?"));
    }
    tf::CancellationManager* const manager = newcomer.ctx->cancellation_manager();
    if (manager == nullptr) return absl::OkStatus();
    newcomer.token = manager->get_cancellation_token();
    const auto cancel = [this, key, serial = gathering.serial] { Cancel(key, serial); };
    if (manager->RegisterCallback(newcomer.token, cancel)) return absl::OkStatus();
    return absl::CancelledError(absl::StrCat(who, " came after its step was cancelled."));
  }

  std::unique_ptr<Gathering> Take(Pending::iterator entry) {
    std::unique_ptr<Gathering> taken = std::move(entry->second);
    pending_.erase(entry);
    return taken;
  }

  void Cancel(const Key& key, int64_t serial) {
    std::unique_ptr<Gathering> taken;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto entry = pending_.find(key);
      if (entry == pending_.end() || entry->second->serial != serial) return;
      taken = Take(entry);
    }
    FinishAll(*taken, absl::CancelledError(absl::StrCat(
                          taken->title, "the step was cancelled when ", taken->WhoCame(), ".")));
  }

  // The watchdog: one thread that fails each gathering that is not complete at its deadline.
  void Watch() {
    while (true) {
      std::this_thread::sleep_for(kWatchdogPeriod);
      while (const std::unique_ptr<Gathering> late = TakeLate()) {
        FinishAll(*late, absl::DeadlineExceededError(absl::StrCat(
                             late->title, "within ", late->timeout.count(), " s ", late->WhoCame(),
                             ". Every device has to run its op in the same step; ",
                             kTimeoutVariable, " sets how long they wait.")));
      }
    }
  }

  std::unique_ptr<Gathering> TakeLate() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = pending_.begin(); entry != pending_.end(); ++entry) {
      if (entry->second->deadline <= Clock::now()) return Take(entry);
    }
    return nullptr;
  }

  std::mutex mutex_;  // Guards what follows; never held while a `done` runs.
  Pending pending_;
  int64_t next_serial_ = 0;
};

auto* const rendezvous = new Rendezvous;  // Never destroyed: its thread has no end.

// 16-bit floats are reduced in 32 bits and rounded once. Integers wrap around (-fwrapv).
// The maximum of anything and NaN is NaN, as in numpy.
template <typename T>
void Reduce(bool sum, const Gathering& gathering) {
  using A = std::conditional_t<std::is_same_v<T, Eigen::half>, float, T>;
  std::vector<const T*> inputs;
  std::vector<T*> outputs;
  for (const auto& [device, participant] : gathering.participants) {
    inputs.push_back(participant.ctx->input(0).template flat<T>().data());
    outputs.push_back(participant.output->template flat<T>().data());
  }
  const int64_t size = gathering.participants.begin()->second.output->NumElements();
  for (int64_t i = 0; i < size; ++i) {
    A total = static_cast<A>(inputs[0][i]);
    for (size_t d = 1; d < inputs.size(); ++d) {
      const A next = static_cast<A>(inputs[d][i]);
      total = sum ? total + next : total > next || total != total ? total : next;
    }
    outputs[0][i] = static_cast<T>(total);
  }
  for (size_t d = 1; d < outputs.size(); ++d) std::copy_n(outputs[0], size, outputs[d]);
}

template <typename T>
class NcclAllReduceCpuKernel : public tf::AsyncOpKernel {
 public:
  explicit NcclAllReduceCpuKernel(tf::OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reduction", &reduction_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_devices", &num_devices_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES(ctx, reduction_ == "sum" || reduction_ == "max",
                absl::UnimplementedError("tfcdo only sums, and takes maxima."));
  }

  void ComputeAsync(tf::OpKernelContext* ctx, DoneCallback done) override {
    const tf::Tensor& input = ctx->input(0);
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, input.shape(), &output), done);
    const char* const timeout = std::getenv(kTimeoutVariable);
    const tf::FrameAndIter loop = ctx->frame_iter();
    const Key key(ctx->step_id(), loop.frame_id, loop.iter_id, shared_name_);
    Gathering fresh;
    fresh.title = absl::StrCat("NcclAllReduce '", shared_name_, "': ");
    fresh.request = absl::StrCat(reduction_, " of ", tf::DataTypeString(input.dtype()),
                                 input.shape().DebugString(), " over ", num_devices_, " devices");
    fresh.num_devices = num_devices_;
    fresh.timeout =
        std::chrono::duration<double>(timeout ? std::atof(timeout) : kDefaultTimeoutSeconds);
    const std::unique_ptr<Gathering> complete = rendezvous->Join(
        key, std::move(fresh), Participant{ctx, std::move(done), output});
    if (complete == nullptr) return;  // `ctx` and `this` may be gone.
    Reduce<T>(reduction_ == "sum", *complete);
    FinishAll(*complete, absl::OkStatus());
  }

 private:
  std::string reduction_;
  int num_devices_;
  std::string shared_name_;
};

// All types that the op's definition allows; bfloat16 is not among them.
#define TFCDO_REGISTER(T)                                                  \
  REGISTER_KERNEL_BUILDER(                                                 \
      Name("NcclAllReduce").Device(tf::DEVICE_CPU).TypeConstraint<T>("T"), \
      NcclAllReduceCpuKernel<T>)
TFCDO_REGISTER(Eigen::half);
TFCDO_REGISTER(float);
TFCDO_REGISTER(double);
TFCDO_REGISTER(int32_t);
TFCDO_REGISTER(int64_t);

}  // namespace
}  // namespace tfcdo
