package com.paceline.example;

import com.paceline.client.Client;
import com.paceline.client.Generation;
import com.paceline.client.PacelineException;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.Message;
import com.paceline.scheduler.v1.Messages;
import com.paceline.scheduler.v1.StopConditions;
import java.time.Duration;
import java.util.Map;

/**
 * Streams the answer to a question. PACELINE_ADDRESS has the schedulers' addresses, with commas; default:
 * 127.0.0.1:50051. PACELINE_TOKEN is sent if it is set.
 */
public final class Chat {
  private Chat() {}

  /** Answers the question that is the only argument. */
  public static void main(String[] arguments) {
    if (arguments.length != 1) {
      System.err.println("usage: Chat QUESTION");
      System.exit(2);
    }
    Map<String, String> environment = System.getenv();
    String[] addresses = environment.getOrDefault("PACELINE_ADDRESS", "127.0.0.1:50051").split(",");
    String token = environment.getOrDefault("PACELINE_TOKEN", "");
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setMessages(
                Messages.newBuilder()
                    .addMessages(Message.newBuilder().setRole("user").setContent(arguments[0])))
            .setStop(StopConditions.newBuilder().setMaxTokens(256))
            .build();
    try (Client client = Client.builder(addresses).token(token).build();
        Generation stream = client.generate(request, Duration.ofMinutes(5))) {
      for (GenerateResponse event : stream) {
        System.out.print(event.getDelta().getText());
        System.out.flush();
        if (event.hasFinished()) {
          var usage = event.getFinished().getUsage();
          System.out.printf("%n%d tokens in %d ms%n", usage.getCompletionTokens(), usage.getTotalMs());
        }
      }
    } catch (PacelineException error) {
      String hint = error.retryAfter().map(after -> "; try again in " + after.toMillis() + " ms").orElse("");
      System.err.println(error.code() + ": " + error.getMessage() + hint);
      System.exit(1);
    }
  }
}
