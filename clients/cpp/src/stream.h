#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "connections.h"
#include "paceline/client.h"
#include "resume.h"

namespace paceline {

// What a Stream consists of.
struct Stream::State {
  State(std::shared_ptr<Connections> connections, Attempts attempts, ResumableStream resumable)
      : connections(std::move(connections)), attempts(std::move(attempts)), resumable(std::move(resumable)) {}
  ~State();

  bool next(v1::GenerateResponse& event);
  void cancel();

  std::shared_ptr<Connections> connections;
  Attempts attempts;
  ResumableStream resumable;

 private:
  bool read(v1::GenerateResponse& event);
  bool receive(v1::GenerateResponse& event);
  void begin();
  void again(const Error& error);
  void end();
  grpc::Status leave(bool cancel);

  bool ended_ = false;
  std::mutex mutex_;  // of what `cancel` touches
  std::condition_variable cancellation_;
  bool cancelled_ = false;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Call> call_;  // as long as `reader_`
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
};

}  // namespace paceline
