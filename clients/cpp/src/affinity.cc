#include "affinity.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <openssl/sha.h>

namespace paceline {
namespace {

constexpr char VERSION[] = "paceline-affinity-1";
constexpr size_t MAX_TEXT_BYTES = 1024;
constexpr int MAX_TOKEN_IDS = 256;

std::string sha256(const std::string& bytes) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

void add(std::string& bytes, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift & 0xff));
}

void add(std::string& bytes, const std::string& text) {
  add(bytes, static_cast<uint32_t>(text.size()));
  bytes += text;
}

std::string beginning(const std::string& text) {
  size_t end = std::min(text.size(), MAX_TEXT_BYTES);
  while (end > 0 && end < text.size() && (text[end] & 0xc0) == 0x80) --end;  // in the middle of a character
  return text.substr(0, end);
}

std::string content_of(const v1::Message& message) {
  if (!message.content().empty()) return message.content();
  std::string joined;
  for (const v1::ContentPart& part : message.parts()) joined += part.text();
  return joined;
}

// 1.25 of the mean load with the new call, rounded up: who has as much gets no more.
uint64_t share(const std::vector<std::string>& order, const LoadOf& load) {
  uint64_t sum = 1;
  for (const std::string& address : order) sum += load(address);
  return (5 * sum + 4 * order.size() - 1) / (4 * order.size());
}

}  // namespace

std::string affinity_key(const v1::GenerateRequest& request, const std::string& own) {
  if (!own.empty()) return sha256(own);
  std::string bytes;
  add(bytes, VERSION);
  add(bytes, request.model());
  add(bytes, request.cache_salt());
  if (request.has_messages()) {
    bytes += 'm';
    for (const v1::Message& message : request.messages().messages()) {
      add(bytes, message.role());
      add(bytes, message.name());
      add(bytes, content_of(message));
      if (message.role() == "user") break;
    }
  } else if (request.has_token_ids()) {
    bytes += 'i';
    const int count = std::min(request.token_ids().ids_size(), MAX_TOKEN_IDS);
    for (int index = 0; index < count; ++index) add(bytes, request.token_ids().ids(index));
  } else {
    bytes += 't';
    add(bytes, beginning(request.text()));
  }
  return sha256(bytes);
}

std::vector<std::string> preference(const std::string& key, const std::vector<std::string>& addresses) {
  std::vector<std::pair<std::string, std::string>> weighed;  // weights are big-endian: in the order of their bytes
  for (const std::string& address : addresses) weighed.emplace_back(sha256(key + address).substr(0, 8), address);
  std::sort(weighed.begin(), weighed.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  std::vector<std::string> order;
  for (const auto& [weight, address] : weighed) order.push_back(address);
  return order;
}

std::string choice(const std::vector<std::string>& order, const LoadOf& live, const LoadOf& reported) {
  const uint64_t least = share(order, live), most = share(order, reported);
  const std::string* fewest = nullptr;
  for (const std::string& address : order) {
    if (live(address) >= least) continue;
    if (reported(address) < most) return address;
    if (!fewest) fewest = &address;
  }
  return *fewest;  // there is one: not all have more than the mean
}

}  // namespace paceline
