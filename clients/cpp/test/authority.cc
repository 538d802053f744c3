#include "authority.h"

#include <stdexcept>

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

namespace {

constexpr long HOUR = 60 * 60;

template <typename T>
T* made(T* one) {
  if (!one) throw std::runtime_error("OpenSSL made nothing");
  return one;
}

std::string written(int (*write)(BIO*, const void*), const void* what) {
  BIO* bio = made(BIO_new(BIO_s_mem()));
  write(bio, what);
  char* bytes;
  const long size = BIO_get_mem_data(bio, &bytes);
  const std::string pem(bytes, size);
  BIO_free(bio);
  return pem;
}

std::string pem_of(const X509* one) {
  return written(
      [](BIO* bio, const void* what) { return PEM_write_bio_X509(bio, static_cast<const X509*>(what)); }, one);
}

std::string pem_of(const EVP_PKEY* key) {
  return written(
      [](BIO* bio, const void* what) {
        return PEM_write_bio_PrivateKey(bio, static_cast<const EVP_PKEY*>(what), nullptr, nullptr, 0, nullptr, nullptr);
      },
      key);
}

void extend(X509* one, int kind, const std::string& value) {
  X509_EXTENSION* extension = made(X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
  X509_add_ext(one, extension, -1);
  X509_EXTENSION_free(extension);
}

void name(X509_NAME* of, const std::string& common) {
  X509_NAME_add_entry_by_txt(of, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(common.c_str()), -1, -1, 0);
}

X509* signed_by(EVP_PKEY* signer, EVP_PKEY* key, const std::string& subject, int kind, const std::string& value) {
  static long serial = 0;
  X509* one = made(X509_new());
  X509_set_version(one, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(one), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(one), -HOUR);
  X509_gmtime_adj(X509_getm_notAfter(one), HOUR);
  name(X509_get_issuer_name(one), "an authority");
  name(X509_get_subject_name(one), subject);
  extend(one, kind, value);
  X509_set_pubkey(one, key);
  X509_sign(one, signer, EVP_sha256());
  return one;
}

}  // namespace

Authority::Authority()
    : key_(made(EVP_EC_gen("P-256")), EVP_PKEY_free),
      own_(signed_by(key_.get(), key_.get(), "an authority", NID_basic_constraints, "critical,CA:TRUE"), X509_free) {}

std::string Authority::pem() const { return pem_of(own_.get()); }

Certificate Authority::issue(const std::string& dns_name) const {
  const Owned<EVP_PKEY> key(made(EVP_EC_gen("P-256")), EVP_PKEY_free);
  const Owned<X509> one(signed_by(key_.get(), key.get(), "a server", NID_subject_alt_name, "DNS:" + dns_name),
                        X509_free);
  return {pem_of(key.get()), pem_of(one.get())};
}
