package com.paceline.client;

import static java.nio.charset.StandardCharsets.US_ASCII;

import io.grpc.ServerCredentials;
import io.grpc.TlsChannelCredentials;
import io.grpc.TlsServerCredentials;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;

/** Issues certificates, by the JDK's keytool. */
final class Authority {
  private static final String PASSWORD = "password";

  private final Path file;

  Authority() throws IOException, InterruptedException {
    Path folder = Files.createTempDirectory("authority");
    folder.toFile().deleteOnExit();
    file = folder.resolve("keys");
    file.toFile().deleteOnExit();
    make("ca", "-ext", "bc:c");
  }

  /** Of servers whose clients have a certificate of this authority. */
  ServerCredentials server(String name) throws Exception {
    issue(name);
    return TlsServerCredentials.newBuilder()
        .keyManager(chain(name), key(name))
        .trustManager(chain("ca"))
        .clientAuth(TlsServerCredentials.ClientAuth.REQUIRE)
        .build();
  }

  TlsChannelCredentials client(String name) throws Exception {
    issue(name);
    return (TlsChannelCredentials)
        TlsChannelCredentials.newBuilder().keyManager(chain(name), key(name)).trustManager(chain("ca")).build();
  }

  private void issue(String name) throws IOException, InterruptedException, GeneralSecurityException {
    if (!keys().containsAlias(name)) {
      make(name, "-signer", "ca", "-ext", "san=dns:" + name);
    }
  }

  private void make(String name, String... more) throws IOException, InterruptedException {
    String keytool = Path.of(System.getProperty("java.home"), "bin", "keytool").toString();
    List<String> command = new ArrayList<>(List.of(keytool, "-genkeypair", "-alias", name, "-keyalg", "EC"));
    command.addAll(List.of("-dname", "CN=" + name, "-keystore", file.toString(), "-storepass", PASSWORD));
    command.addAll(List.of(more));
    Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
    String said = new String(process.getInputStream().readAllBytes(), US_ASCII);
    Tests.same(process.waitFor(), 0, said);
  }

  private KeyStore keys() throws IOException, GeneralSecurityException {
    return KeyStore.getInstance(file.toFile(), PASSWORD.toCharArray());
  }

  private InputStream chain(String name) throws IOException, GeneralSecurityException {
    return pem("CERTIFICATE", keys().getCertificate(name).getEncoded());
  }

  private InputStream key(String name) throws IOException, GeneralSecurityException {
    return pem("PRIVATE KEY", keys().getKey(name, PASSWORD.toCharArray()).getEncoded());
  }

  private static InputStream pem(String what, byte[] bytes) {
    String text = Base64.getMimeEncoder().encodeToString(bytes);
    String pem = "-----BEGIN " + what + "-----\n" + text + "\n-----END " + what + "-----\n";
    return new ByteArrayInputStream(pem.getBytes(US_ASCII));
  }
}
