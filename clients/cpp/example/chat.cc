// Streams the answer to a question: chat "Why is the sky blue?"
//
// PACELINE_ADDRESS has the schedulers' addresses, with commas; default: 127.0.0.1:50051. PACELINE_TOKEN is sent if it
// is set.

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "paceline/client.h"

namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: chat QUESTION\n";
    return 2;
  }
  paceline::Options options;
  options.token = variable("PACELINE_TOKEN", "");
  paceline::Client client(split(variable("PACELINE_ADDRESS", "127.0.0.1:50051")), options);
  paceline::v1::GenerateRequest request = paceline::chat({{"user", argv[1]}});
  request.mutable_stop()->set_max_tokens(256);
  try {
    paceline::Stream stream = client.generate(request, std::chrono::minutes(5));
    for (paceline::v1::GenerateResponse event; stream.next(event);) {
      std::cout << event.delta().text() << std::flush;
      if (!event.has_finished()) continue;
      const auto& usage = event.finished().usage();
      std::cout << "\n" << usage.completion_tokens() << " tokens in " << usage.total_ms() << " ms\n";
    }
  } catch (const paceline::Error& error) {
    std::cerr << error.what();
    if (error.retryable() && error.retry_after) std::cerr << "; try again in " << error.retry_after->count() << " ms";
    std::cerr << "\n";
    return 1;
  }
}
