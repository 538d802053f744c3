package com.paceline.client;

import static java.nio.charset.StandardCharsets.ISO_8859_1;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.SocketTimeoutException;

/** A port without a certificate, and what came there. */
final class Attacker implements AutoCloseable {
  private static final int PATIENCE_MS = 100;

  private final ServerSocket port = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
  private final ByteArrayOutputStream received = new ByteArrayOutputStream();
  private final Thread reader = new Thread(this::read);

  Attacker() throws IOException {
    reader.start();
  }

  String address() {
    return "127.0.0.1:" + port.getLocalPort();
  }

  /** All bytes, one character each. */
  String received() {
    return received.toString(ISO_8859_1);
  }

  private void read() {
    while (!port.isClosed()) {
      try (Socket one = port.accept()) {
        one.setSoTimeout(PATIENCE_MS);
        readAll(one);
      } catch (IOException closed) {
        // The next one, or the end.
      }
    }
  }

  private void readAll(Socket one) throws IOException {
    try {
      for (int next = one.getInputStream().read(); next >= 0; next = one.getInputStream().read()) {
        received.write(next);
      }
    } catch (SocketTimeoutException silent) {
      // It waits for an answer.
    }
  }

  @Override
  public void close() throws IOException {
    port.close();
    try {
      reader.join();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }
}
