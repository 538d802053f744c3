// Tests with directories that lead astray.

#include <arpa/inet.h>
#include <grpcpp/security/server_credentials.h>
#include <sys/socket.h>
#include <unistd.h>

#include "authority.h"
#include "calls.h"
#include "fake.h"
#include "tests.h"

namespace {

using paceline::Directory;

const char* const SECRET = "a-token-of-many-bytes";

// An attacker's port without a certificate, and what came there.
class Listening {
 public:
  Listening() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    const bool listens = bind(socket_, reinterpret_cast<sockaddr*>(&at), size) == 0 && listen(socket_, 16) == 0 &&
                         getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &size) == 0;
    expect(listens, "no port is to be had");
    address_ = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    thread_ = std::thread([this] { run(); });
  }

  const std::string& address() const { return address_; }

  // What came until now; nothing more is taken.
  const std::string& received() {
    if (!thread_.joinable()) return received_;
    shutdown(socket_, SHUT_RDWR);
    thread_.join();
    close(socket_);
    return received_;
  }

  ~Listening() { received(); }

 private:
  void run() {
    for (int connection; (connection = accept(socket_, nullptr, nullptr)) >= 0; close(connection)) {
      const timeval limit{0, 100'000};
      setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
      char bytes[4096];
      for (ssize_t count; (count = recv(connection, bytes, sizeof bytes, 0)) > 0;) received_.append(bytes, count);
    }
  }

  const int socket_;
  std::string address_;
  std::string received_;
  std::thread thread_;
};

// Of a server whose clients have a certificate of `clients`.
std::shared_ptr<grpc::ServerCredentials> server(const Certificate& own, const Authority& clients) {
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = clients.pem();
  options.pem_key_cert_pairs.push_back({own.key, own.pem});
  return grpc::SslServerCredentials(options);
}

}  // namespace

void an_entry_that_lies_about_its_model_serves_nobody() {
  for (const bool unary : {false, true}) {
    Fake given, liar;
    liar.model = "another";
    liar.text = "a lie";
    given.others = {entry_of(liar.serve())};
    given.serve();
    paceline::Client client = knowing(given, 2);
    call_often(client, unary);
    expect(client.addresses().size() == 1, "the liar is used");
    expect(liar.infos == (unary ? 1 : 0) && liar.requests.size() == (unary ? 0 : 1), "it was asked twice");
  }
}

void a_poisoned_entry_gets_no_byte_of_a_token() {
  const Authority ours, foreign;
  Fake given, honest, stranger, other_name, plain;
  Listening bare;
  given.serve(server(ours.issue("localhost"), ours));
  honest.serve(server(ours.issue("good.test"), ours));
  stranger.serve(server(foreign.issue("good.test"), ours));
  other_name.serve(server(ours.issue("localhost"), ours));
  plain.serve();
  for (const std::string& one :
       {honest.address(), stranger.address(), other_name.address(), plain.address(), bare.address()}) {
    given.others.push_back(entry_of(one, "good.test"));
  }
  given.others.push_back(entry_of("localhost" + plain.address().substr(plain.address().find(':'))));  // in the clear
  const Certificate own = ours.issue("a client");
  paceline::Options options;
  options.token = SECRET;
  options.tls = {ours.pem(), own.key, own.pem};
  for (const Directory use : {Directory::safe, Directory::any}) {
    options.directory = use;
    paceline::Client client = knowing(given, 6, options);
    call_often(client, true);
    call_often(client, false);
  }
  const std::set<std::string> callers{std::string("Bearer ") + SECRET};
  expect(given.callers == callers && honest.callers == callers, "the honest ones are not used");
  for (const Fake* one : {&stranger, &other_name, &plain}) expect(one->callers.empty(), "a poisoned entry was called");
  const std::string& received = bare.received();  // a TLS handshake, which nobody answers
  expect(!received.empty() && received[0] == 0x16, "no handshake came");
  expect(received.find(SECRET) == std::string::npos, "the token came");
}

void nothing_is_learned_over_tls_without_an_authority() {
  const Authority ours;
  const Certificate own = ours.issue("a client");
  Fake given;
  given.others = {entry_of("127.0.0.1:1", "good.test")};
  given.serve(server(ours.issue("localhost"), ours));
  paceline::Options options;
  options.credentials = grpc::SslCredentials({ours.pem(), own.key, own.pem});
  options.directory = Directory::any;
  paceline::Client client = knowing(given, 1, options);
  call_often(client, false);
  options = {};
  options.tls.emplace();
  try {
    paceline::Client({given.address()}, options).complete(prompt());
    expect(false, "the server is trusted");
  } catch (const paceline::Error& error) {
    expect(error.code == grpc::StatusCode::UNAVAILABLE, error.what());
  }
  expect(given.looks == 0, "it has looked");
}

void a_token_stays_on_this_machine_without_tls() {
  Fake given;
  given.others = {entry_of("10.0.0.2:1"), entry_of("unix:1"), entry_of("localhost:1", "name")};
  given.serve();
  paceline::Options options;
  options.token = SECRET;
  knowing(given, 1, options);
}

void addresses_that_nobody_can_reach_end_no_call() {
  Fake given;
  for (const char* one : {"127.0.0.1:99999", "[:::::]:1", "..:1", "-:1", "127.0.0.1:1"}) {
    given.others.push_back(entry_of(one));
  }
  given.serve();
  paceline::Options options;
  options.directory = Directory::any;
  paceline::Client client = knowing(given, 6, options);
  call_often(client, true);
  call_often(client, false);
}
