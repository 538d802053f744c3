package com.paceline.client;

import static com.paceline.client.Tests.check;
import static com.paceline.client.Tests.same;

import com.paceline.scheduler.v1.GenerateRequest;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;

/** What tests do with clients of fakes. */
final class Stage {
  static final Duration PATIENCE = Duration.ofSeconds(20);

  static final GenerateRequest PROMPT = GenerateRequest.newBuilder().setText("hello").build();

  private Stage() {}

  static Client clientOf(Fake fake) {
    return Client.builder(fake.address()).build();
  }

  /** Looks into the directory now, which lists so many others. */
  static void look(Client client, int others) throws Exception {
    client.connections().look(Connections.nowMs()).get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
    same(client.addresses().size(), 1 + others, client.addresses());
  }

  /** The text of a call whose key is this number, as a stream or not. */
  static String call(Client client, int number, boolean isUnary) {
    String key = "key " + number;
    if (isUnary) {
      return client.complete(PROMPT, PATIENCE, key).get(0).getText();
    }
    try (Generation stream = client.generate(PROMPT, PATIENCE, key)) {
      return stream.collect().get(0).getText();
    }
  }

  static void until(String what, BooleanSupplier is) throws InterruptedException {
    long end = System.nanoTime() + PATIENCE.toNanos();
    while (!is.getAsBoolean()) {
      check(System.nanoTime() < end, "waited in vain until " + what);
      Thread.sleep(5);
    }
  }
}
