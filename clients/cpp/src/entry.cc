#include "entry.h"

#include <arpa/inet.h>

namespace paceline {
namespace {

constexpr char DIGITS[] = "0123456789";
constexpr char OF_IPV6[] = "0123456789abcdefABCDEF:.";
constexpr char OF_NAMES[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
// What gRPC takes for a scheme, though a port follows.
const std::set<std::string> NO_HOSTS = {"unix",  "unix-abstract", "dns",         "ipv4",      "ipv6",
                                        "vsock", "xds",           "passthrough", "google-c2p"};

bool consists_of(const std::string& text, const char* characters) {
  return !text.empty() && text.find_first_not_of(characters) == std::string::npos;
}

bool begins_with(const std::string& text, const std::string& beginning) {
  return text.compare(0, beginning.size(), beginning) == 0;
}

bool is_bracketed(const std::string& host) { return host.size() > 1 && host.front() == '[' && host.back() == ']'; }

std::string lower(std::string text) {
  for (char& one : text) {
    if ('A' <= one && one <= 'Z') one += 'a' - 'A';
  }
  return text;
}

}  // namespace

Learned::Learned(const v1::SchedulerEntry& entry)
    : start(entry.address(), entry.instance()),
      tls_name(entry.tls_name()),
      model(entry.model_fingerprint()),
      load(uint64_t{entry.load().running()} + entry.load().waiting()),
      drains(entry.state() == v1::SCHEDULER_STATE_DRAINING),
      adapters(entry.adapters().begin(), entry.adapters().end()) {}

bool is_host_port(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  if (port.size() > 5 || !consists_of(port, DIGITS)) return false;
  if (is_bracketed(host)) return consists_of(host.substr(1, host.size() - 2), OF_IPV6);
  return consists_of(host, OF_NAMES) && NO_HOSTS.count(lower(host)) == 0;
}

bool is_local(const std::string& address) {
  return begins_with(address, "unix:") || begins_with(address, "unix-abstract:") || is_loopback(address);
}

bool is_loopback(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (is_bracketed(host)) host = host.substr(1, host.size() - 2);
  in_addr four;
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
  in6_addr six;
  return host == "localhost" || (inet_pton(AF_INET6, host.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six));
}

}  // namespace paceline
