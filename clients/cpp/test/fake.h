// A scheduler with a directory, for tests: it generates six tokens for each request, and continues such streams.

#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_context.h>

#include "paceline/scheduler/v1/scheduler.grpc.pb.h"

namespace v1 = paceline::scheduler::v1;

// The text of each completion that a fake generates.
extern const char* const WHOLE;

// An entry for a scheduler that serves the model of all fakes.
v1::SchedulerEntry entry_of(const std::string& address, const std::string& tls_name = "");

class Fake : public v1::SchedulerService::Service {
 public:
  using Watch = grpc::ServerWriter<v1::WatchSchedulersResponse>;

  std::string model = "print";  // its fingerprint
  std::string text;             // instead of each delta's own
  int hang_after = 0;           // so many messages of a stream; 0: never
  std::string live;             // the id of a request that Abort ends
  std::function<grpc::Status(grpc::ServerContext*, Watch*)> answer;  // instead of the directory
  std::vector<v1::SchedulerEntry> others;

  // What came here. Read once its calls have ended, or with the mutex.
  std::mutex mutex;
  int looks = 0;
  int infos = 0;
  std::vector<v1::GenerateRequest> requests;
  std::set<std::string> callers;  // what calls had as authorization

  ~Fake() override { stop(); }

  // Serves from now on; its address.
  const std::string& serve(std::shared_ptr<grpc::ServerCredentials> credentials = nullptr);

  // Ends all calls, and serves no more.
  void stop();

  const std::string& address() const { return address_; }
  int seen_looks();

  grpc::Status Generate(grpc::ServerContext*, const v1::GenerateRequest*,
                        grpc::ServerWriter<v1::GenerateResponse>*) override;
  grpc::Status GenerateUnary(grpc::ServerContext*, const v1::GenerateUnaryRequest*,
                             v1::GenerateUnaryResponse*) override;
  grpc::Status GetModelInfo(grpc::ServerContext*, const v1::GetModelInfoRequest*, v1::GetModelInfoResponse*) override;
  grpc::Status WatchSchedulers(grpc::ServerContext*, const v1::WatchSchedulersRequest*, Watch*) override;
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest*, v1::AbortResponse*) override;

 private:
  void called(const grpc::ServerContext& context);
  std::vector<v1::GenerateResponse> messages(const grpc::ServerContext& context, const v1::GenerateRequest& request);

  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};
