// Issues certificates for tests.

#pragma once

#include <memory>
#include <string>

#include <openssl/evp.h>
#include <openssl/x509.h>

struct Certificate {
  std::string key, pem;
};

class Authority {
 public:
  Authority();

  // Of the authority itself: what those trust that it issues.
  std::string pem() const;

  Certificate issue(const std::string& dns_name) const;

 private:
  template <typename T>
  using Owned = std::unique_ptr<T, void (*)(T*)>;

  Owned<EVP_PKEY> key_;
  Owned<X509> own_;
};
