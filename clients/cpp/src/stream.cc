#include "stream.h"

#include <future>

namespace paceline {
namespace {

// The wait for a stream's end when all completions have finished.
constexpr Milliseconds END_TIMEOUT{1'000};

}  // namespace

Stream::Stream(std::unique_ptr<State> state) : state_(std::move(state)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

bool Stream::next(v1::GenerateResponse& event) { return state_->next(event); }
void Stream::cancel() { state_->cancel(); }
const std::string& Stream::request_id() const { return state_->resumable.request_id(); }
const v1::Started* Stream::started() const { return state_->resumable.started(); }
const std::vector<v1::TokenLogprobs>& Stream::prompt_logprobs() const { return state_->resumable.prompt_logprobs(); }

Stream::State::~State() { end(); }

bool Stream::State::next(v1::GenerateResponse& event) {
  if (ended_) return false;
  try {
    if (read(event)) return true;
  } catch (...) {
    end();
    throw;
  }
  end();
  return false;
}

void Stream::State::cancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
  if (context_) context_->TryCancel();
  cancellation_.notify_all();
}

// The next event, of the current attempt or of one that continues it; false: the stream has ended well.
bool Stream::State::read(v1::GenerateResponse& event) {
  for (;;) {
    if (!reader_) begin();
    std::optional<Error> failure;
    while (receive(event)) {
      if ((failure = connections->check_started(attempts.address(), event))) break;
      attempts.answered(event.started().model_fingerprint());
      if (resumable.see(event)) return true;
    }
    const grpc::Status status = leave(failure.has_value());
    if (!failure) {
      if (status.ok()) resumable.check_end();
      if (status.ok() || resumable.is_complete()) return false;
      failure = error_of(status);
    }
    again(*failure);
  }
}

// The next message. The end of a stream of which nothing is missing comes soon, or is made.
bool Stream::State::receive(v1::GenerateResponse& event) {
  if (!resumable.is_complete()) return reader_->Read(&event);
  std::promise<void> ended;
  const auto limit = std::async(std::launch::async, [this, end = ended.get_future()] {
    if (end.wait_for(END_TIMEOUT) == std::future_status::timeout) context_->TryCancel();
  });
  const bool is_more = reader_->Read(&event);
  ended.set_value();
  limit.wait();
  return is_more;
}

void Stream::State::begin() {
  const Clock::time_point now = Clock::now();
  const v1::GenerateRequest request = resumable.attempt(now);
  auto context = std::make_unique<grpc::ClientContext>();
  connections->prepare(*context, attempts.timeout(now), attempts.load_wait());
  std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_) throw Error(grpc::StatusCode::CANCELLED, "the stream was cancelled");
  context_ = std::move(context);
  call_ = connections->begin(attempts);
  reader_ = call_->stub->Generate(context_.get(), request);
}

// Waits until the attempt after the failed one. Throws the error for the caller if there is none.
void Stream::State::again(const Error& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::string address = attempts.address();
  if (!cancelled_) {
    Milliseconds wait{0};
    try {
      wait = attempts.failed(error, Clock::now());
    } catch (const Error& final) {
      throw resumable.final_error(final, address);
    }
    cancellation_.wait_for(lock, wait, [this] { return cancelled_; });
  }
  if (cancelled_) throw Error(grpc::StatusCode::CANCELLED, "the stream was cancelled");
}

void Stream::State::end() {
  ended_ = true;
  if (reader_) leave(true);
}

// Ends the current attempt, which has come to its end if it is not to be cancelled.
grpc::Status Stream::State::leave(bool cancel) {
  v1::GenerateResponse ignored;
  if (cancel) context_->TryCancel();
  while (cancel && reader_->Read(&ignored)) {
  }
  const grpc::Status status = reader_->Finish();
  reader_.reset();
  call_.reset();
  return status;
}

}  // namespace paceline
