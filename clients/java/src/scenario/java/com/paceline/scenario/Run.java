package com.paceline.scenario;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.paceline.client.Client;
import com.paceline.client.Collector;
import com.paceline.client.Generation;
import com.paceline.client.PacelineException;
import com.paceline.scheduler.v1.Completion;
import com.paceline.scheduler.v1.EmbedRequest;
import com.paceline.scheduler.v1.EmbedResponse;
import com.paceline.scheduler.v1.Embedding;
import com.paceline.scheduler.v1.Finished;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.RerankRequest;
import com.paceline.scheduler.v1.RerankResponse;
import com.paceline.scheduler.v1.ScoreRequest;
import com.paceline.scheduler.v1.ScoreResponse;
import com.paceline.scheduler.v1.TokenLogprobs;
import com.paceline.scheduler.v1.TokenizeRequest;
import io.grpc.TlsChannelCredentials;
import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/** Runs the steps that tests/scenario gives to all clients: JSON lines in, outcomes out. */
public final class Run {
  private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  private final JsonObject step;

  private Run(JsonObject step) {
    this.step = step;
  }

  /** Reads steps from stdin. */
  public static void main(String[] arguments) throws IOException {
    var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      Run run = new Run(JsonParser.parseString(line).getAsJsonObject());
      try (Client client = run.client()) {
        write(run.outcome(client));
      } catch (PacelineException error) {
        write(Map.of("error", describe(error)));
      }
    }
  }

  private Client client() throws IOException {
    Client.Builder builder = Client.builder(GSON.fromJson(step.get("addresses"), String[].class));
    if (step.has("token")) {
      builder.token(text("token"));
    }
    if (step.has("ca")) {
      builder.credentials(TlsChannelCredentials.newBuilder().trustManager(new File(text("ca"))).build());
    }
    if (step.has("failover_timeout_ms")) {
      builder.failoverTimeout(Duration.ofMillis(number("failover_timeout_ms")));
    }
    return builder.build();
  }

  private Map<String, Object> outcome(Client client) throws IOException {
    Duration timeout = step.has("timeout_ms") ? Duration.ofMillis(number("timeout_ms")) : null;
    switch (text("call")) {
      case "model_info":
        var info = client.modelInfo(timeout);
        return Map.of("name", info.getName(), "has_chat_template", info.getHasChatTemplate());
      case "tokenize":
        var input = TokenizeRequest.newBuilder().setText(text("text")).build();
        return Map.of("token_ids", client.tokenize(input, timeout));
      case "detokenize":
        Integer[] ids = GSON.fromJson(step.get("token_ids"), Integer[].class);
        return Map.of("text", client.detokenize(Arrays.asList(ids), timeout));
      case "complete":
        return completions(client.complete(request(), timeout, affinityKey()));
      case "generate":
        return step.has("parallel") ? parallel(client, timeout) : generate(client, timeout);
      case "score":
        return describe(client.score(request(ScoreRequest.newBuilder()).build(), timeout));
      case "embed":
        return describe(client.embed(request(EmbedRequest.newBuilder()).build(), timeout));
      case "rerank":
        return describe(client.rerank(request(RerankRequest.newBuilder()).build(), timeout));
      default:
        throw new IllegalArgumentException("unknown call " + text("call"));
    }
  }

  /** As many streams at once; only the first one reports. */
  private Map<String, Object> parallel(Client client, Duration timeout) throws IOException {
    JsonObject without = step.deepCopy();
    without.remove("report_after_tokens");
    Run other = new Run(without);
    int count = (int) number("parallel");
    ExecutorService threads = Executors.newFixedThreadPool(count);
    try {
      List<Future<Map<String, Object>>> streams = new ArrayList<>();
      for (int i = 0; i < count; i++) {
        Run run = i == 0 ? this : other;
        streams.add(threads.submit(() -> run.generate(client, timeout)));
      }
      Map<String, Object> first = new HashMap<>(streams.get(0).get());
      int different = 0;
      for (Future<Map<String, Object>> stream : streams) {
        different += stream.get().equals(streams.get(0).get()) ? 0 : 1;
      }
      first.put("different", different);
      return first;
    } catch (ExecutionException failed) {
      if (failed.getCause() instanceof PacelineException error) {
        throw error;
      }
      throw new IOException(failed);
    } catch (InterruptedException interrupted) {
      throw new IOException(interrupted);
    } finally {
      threads.shutdownNow();
    }
  }

  private Map<String, Object> generate(Client client, Duration timeout) throws IOException {
    Collector collector = new Collector();
    List<Float> promptLogprobs = List.of();
    try (Generation stream = client.generate(request(), timeout, affinityKey())) {
      int before = 0;
      for (GenerateResponse event : stream) {
        collector.add(event);
        int tokens = before + event.getDelta().getTokenIdsCount();
        if (reached("leave_after_tokens", before, tokens)) {
          return Map.of("left", true);
        }
        if (reached("abort_after_tokens", before, tokens)) {
          client.abort(List.of(stream.requestId()), timeout);
        }
        if (reached("report_after_tokens", before, tokens)) {
          write(Map.of("received", tokens));
        }
        before = tokens;
      }
      promptLogprobs = stream.promptLogprobs().stream().map(TokenLogprobs::getLogprob).toList();
    }
    Map<String, Object> outcome = new HashMap<>(completions(collector.completions()));
    outcome.put("prompt_logprobs", promptLogprobs);
    return outcome;
  }

  private boolean reached(String name, int before, int tokens) {
    long mark = step.has(name) ? number(name) : 0;
    return before < mark && mark <= tokens;
  }

  private GenerateRequest request() throws IOException {
    return request(GenerateRequest.newBuilder()).build();
  }

  private <B extends Message.Builder> B request(B builder) throws IOException {
    JsonFormat.parser().merge(GSON.toJson(step.get("request")), builder);
    return builder;
  }

  private String affinityKey() {
    return step.has("affinity_key") ? text("affinity_key") : "";
  }

  private String text(String name) {
    return step.get(name).getAsString();
  }

  private long number(String name) {
    return step.get(name).getAsLong();
  }

  private static Map<String, Object> completions(List<Completion> found) {
    return Map.of("completions", found.stream().map(Run::describe).toList());
  }

  private static Map<String, Object> describe(Completion one) {
    Finished finished = one.getFinished();
    return Map.of(
        "text", one.getText(),
        "token_ids", one.getTokenIdsList(),
        "reason", finished.getReason().name().replace("FINISH_REASON_", "").toLowerCase(Locale.ROOT),
        "stop_string", finished.getStopString(),
        "prompt_tokens", finished.getUsage().getPromptTokens(),
        "completion_tokens", finished.getUsage().getCompletionTokens());
  }

  private static Map<String, Object> describe(ScoreResponse reply) {
    return Map.of(
        "scores",
        reply.getScoresList().stream()
            .map(one -> Map.of("token_ids", one.getTokenIdsList(), "logprob", one.getLogprob()))
            .toList());
  }

  private static Map<String, Object> describe(EmbedResponse reply) {
    return Map.of("vectors", reply.getEmbeddingsList().stream().map(Embedding::getValuesList).toList());
  }

  private static Map<String, Object> describe(RerankResponse reply) {
    return Map.of(
        "results",
        reply.getResultsList().stream()
            .map(one -> Map.of("index", one.getIndex(), "score", one.getScore()))
            .toList());
  }

  private static Map<String, Object> describe(PacelineException error) {
    Map<String, Object> described = new HashMap<>();
    described.put("code", error.code().name());
    described.put("reason", error.reason());
    described.put("message", error.getMessage());
    described.put("retryable", error.isRetryable());
    described.put("retry_after_ms", error.retryAfter().map(Duration::toMillis).orElse(null));
    described.put("lost", error.isLost());
    return described;
  }

  private static synchronized void write(Map<String, Object> outcome) {
    OUT.println(GSON.toJson(outcome));
  }
}
