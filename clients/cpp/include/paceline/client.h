// The client of Paceline's schedulers: a language model behind gRPC, as streams of tokens.
//
//   paceline::Client client({"127.0.0.1:50051"});
//   paceline::Stream stream = client.generate(paceline::chat({{"user", "Why is the sky blue?"}}));
//   for (paceline::v1::GenerateResponse event; stream.next(event);) std::cout << event.delta().text();
//
// Requests and events are the messages of scheduler.proto; its comments list ranges, defaults and errors. Every call
// throws paceline::Error.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/security/credentials.h>

#include "paceline/error.h"
#include "paceline/scheduler/v1/scheduler.pb.h"

namespace paceline {

namespace v1 = ::paceline::scheduler::v1;

class Connections;

// A call's deadline, which the scheduler honours too; none: no deadline.
using Timeout = std::optional<std::chrono::milliseconds>;

// Which schedulers a client uses that the given ones list in their directory, all of the same model.
enum class Directory {
  off,   // none
  safe,  // over TLS, by the authority in Options::tls and under the name that the directory has for each; or loopback
  any,   // also without TLS elsewhere, if the client has none
};

struct Options {
  // Sent as `authorization: Bearer TOKEN`; empty: none is sent.
  std::string token;
  // Encrypts, by the authority in pem_root_certs (empty: the system's), with the client's own certificate if there is
  // one. None: plaintext, which a scheduler accepts on loopback only.
  std::optional<grpc::SslCredentialsOptions> tls;
  // Any of gRPC's, in place of `tls`.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // How long after the loss of its scheduler a call is sent again.
  std::chrono::milliseconds failover_timeout{30'000};
  // Off with `credentials`, and with the system's authorities: anybody can have a certificate of theirs.
  Directory directory = Directory::safe;
};

// One Generate call, over as many schedulers as it takes. Destroying it cancels the request: the scheduler computes
// nothing for it from its next step on.
class Stream {
 public:
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // Waits for the next event, which has a delta or a finished; false when all completions have finished.
  bool next(v1::GenerateResponse& event);

  // Ends the stream, from any thread: `next` throws an Error with CANCELLED.
  void cancel();

  // The request's id, drawn if the caller gave none: Client::abort takes it.
  const std::string& request_id() const;

  // The request with its defaults filled in; null before the first event.
  const v1::Started* started() const;

  // Of the prompt's tokens but the first, if the request asks for them; complete with the first event.
  const std::vector<v1::TokenLogprobs>& prompt_logprobs() const;

 private:
  friend class Client;
  struct State;
  explicit Stream(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Joins the events of a stream into completions.
class Collector {
 public:
  // Takes the next event of the stream.
  void add(const v1::GenerateResponse& event);

  // What the events so far make, by index. Until its end has come, a completion has no `finished`.
  const std::vector<v1::Completion>& completions() const { return completions_; }

 private:
  std::vector<v1::Completion> completions_;
};

// Calls one scheduler, or several that serve the same model. Calls are spread over them, and those that one refuses
// are tried on the others. A stream whose scheduler dies goes on exactly on another one, or on the same one after its
// restart. Where the schedulers have a directory, the client learns of others with the same model, and uses them too:
// it looks beside its calls, every 10 s at most. Safe for concurrent use.
class Client {
 public:
  // Each address is host:port. Throws std::invalid_argument if there is none.
  explicit Client(const std::vector<std::string>& addresses, Options options = {});
  ~Client();

  // Of the schedulers that are used now: the given ones, then those learned from a directory.
  std::vector<std::string> addresses() const;

  // A stream of events; its first `next` sends the request. Of several schedulers, requests with the same affinity key
  // go to the same one; without a key, those whose prompts begin alike.
  Stream generate(const v1::GenerateRequest& request, Timeout timeout = {}, const std::string& affinity_key = {});

  // Generates, and waits until all completions have finished: one per index. `affinity_key` as in `generate`.
  std::vector<v1::Completion> complete(const v1::GenerateRequest& request, Timeout timeout = {},
                                       const std::string& affinity_key = {});

  // Logprobs of given texts, or of what follows prompts; nothing is generated. It is sent again when its scheduler
  // dies, as `complete`, `embed` and `rerank` are.
  v1::ScoreResponse score(const v1::ScoreRequest& request, Timeout timeout = {});

  // A vector for each text.
  v1::EmbedResponse embed(const v1::EmbedRequest& request, Timeout timeout = {});

  // Documents by how well they answer a query, best first.
  v1::RerankResponse rerank(const v1::RerankRequest& request, Timeout timeout = {});

  // Token ids of a text or of messages, as `generate` would use them.
  std::vector<uint32_t> tokenize(const v1::TokenizeRequest& request, Timeout timeout = {});

  // The text of token ids.
  std::string detokenize(const std::vector<uint32_t>& token_ids, Timeout timeout = {});

  // Ends live requests of this identity, on all schedulers; the ids of those that it ended. Unknown ids are no error.
  std::vector<std::string> abort(const std::vector<std::string>& request_ids, Timeout timeout = {});

  // The model and the limits of a request.
  v1::GetModelInfoResponse model_info(Timeout timeout = {});

  // The live counters of one scheduler that answers.
  v1::GetStatusResponse status(Timeout timeout = {});

 private:
  std::shared_ptr<Connections> connections_;
};

// A request for the answer to a conversation, given as (role, content): "system", "user", "assistant".
v1::GenerateRequest chat(const std::vector<std::pair<std::string, std::string>>& messages);

}  // namespace paceline
