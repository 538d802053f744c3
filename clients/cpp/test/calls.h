// Calls of a client under test.

#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "fake.h"
#include "paceline/client.h"

constexpr std::chrono::milliseconds PATIENCE{20'000};
constexpr int CALLS = 24;  // so many that each of a few schedulers gets some

inline void expect(bool is, const std::string& what) {
  if (!is) throw std::runtime_error(what);
}

template <typename Is>
void until(const std::string& what, Is is) {
  for (const auto end = std::chrono::steady_clock::now() + PATIENCE; !is();) {
    expect(std::chrono::steady_clock::now() < end, "waited in vain until " + what);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

inline v1::GenerateRequest prompt() {
  v1::GenerateRequest request;
  request.set_text("hello");
  request.mutable_sampling()->set_seed(1);
  return request;
}

// Calls with different keys, all of which have the text of the fakes.
inline void call_often(paceline::Client& client, bool unary) {
  for (int i = 0; i < CALLS; ++i) {
    const std::string key = std::to_string(i);
    paceline::Collector collector;
    std::string text;
    if (unary) {
      text = client.complete(prompt(), PATIENCE, key)[0].text();
    } else {
      paceline::Stream stream = client.generate(prompt(), PATIENCE, key);
      for (v1::GenerateResponse event; stream.next(event);) collector.add(event);
      text = collector.completions()[0].text();
    }
    expect(text == WHOLE, "a call had the text " + text);
  }
}

// A client that has looked into the directory of a fake, and uses so many schedulers then.
inline paceline::Client knowing(const Fake& given, size_t count, const paceline::Options& options = {}) {
  paceline::Client client({given.address()}, options);
  client.abort({}, PATIENCE);  // which looks before
  expect(client.addresses().size() == count, "it knows " + std::to_string(client.addresses().size()));
  return client;
}
