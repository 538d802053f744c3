#include "look.h"

#include <cstddef>
#include <system_error>
#include <utility>

#include "errors.h"
#include "known.h"

namespace paceline {
namespace {

// Of one look's answer, each message counted as MESSAGE_BYTES more than it has.
constexpr size_t MAX_LOOK_BYTES = 16 << 20;
constexpr size_t MESSAGE_BYTES = 64 << 10;

}  // namespace

std::vector<v1::SchedulerEntry> listed_at(v1::SchedulerService::Stub& scheduler, grpc::ClientContext& context) {
  const auto reader = scheduler.WatchSchedulers(&context, v1::WatchSchedulersRequest());
  std::vector<v1::SchedulerEntry> entries;
  v1::WatchSchedulersResponse message;
  size_t size = 0;
  while (size < MAX_LOOK_BYTES && reader->Read(&message)) {
    size += MESSAGE_BYTES + message.ByteSizeLong();
    for (v1::SchedulerEntry& entry : *message.mutable_entries()) {
      if (entries.size() < MAX_ENTRIES) entries.push_back(std::move(entry));
    }
    if (message.complete()) break;
  }
  const bool is_whole = message.complete(), is_too_much = size >= MAX_LOOK_BYTES;
  context.TryCancel();
  while (reader->Read(&message)) {
  }
  const grpc::Status status = reader->Finish();
  if (is_whole) return entries;
  if (!is_too_much && !status.ok()) throw error_of(status);
  return {};
}

void Looks::begin(std::function<void(grpc::ClientContext&)> look) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || context_) return;
  if (thread_.joinable()) thread_.join();  // it has ended its look
  context_ = std::make_unique<grpc::ClientContext>();
  const auto run = [this, look = std::move(look), context = context_.get()] {
    look(*context);
    std::lock_guard<std::mutex> lock(mutex_);
    context_.reset();
    ended_.notify_all();
  };
  try {
    thread_ = std::thread(run);
  } catch (const std::system_error&) {  // no thread is to be had: the call goes on without a look
    context_.reset();
  }
}

void Looks::wait(Milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait_for(lock, limit, [this] { return !context_; });
}

void Looks::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    if (context_) context_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace paceline
