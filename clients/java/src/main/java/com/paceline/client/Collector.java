package com.paceline.client;

import com.paceline.scheduler.v1.Completion;
import com.paceline.scheduler.v1.Delta;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.ToolCall;
import com.paceline.scheduler.v1.ToolCallDelta;
import java.util.ArrayList;
import java.util.List;

/** Joins the events of a stream into completions. */
public final class Collector {
  private final List<Joined> joined = new ArrayList<>(); // by index

  private static final class Joined {
    final Completion.Builder completion = Completion.newBuilder();
    final StringBuilder text = new StringBuilder();
    final StringBuilder reasoning = new StringBuilder();
    final List<StringBuilder> arguments = new ArrayList<>(); // of each tool call
  }

  /** Takes the next event of the stream. */
  public void add(GenerateResponse event) {
    while (joined.size() <= event.getIndex()) {
      joined.add(new Joined());
    }
    Joined one = joined.get(event.getIndex());
    if (event.hasFinished()) {
      one.completion.setFinished(event.getFinished());
      return;
    }
    Delta delta = event.getDelta();
    one.text.append(delta.getText());
    one.reasoning.append(delta.getReasoning());
    one.completion.addAllTokenIds(delta.getTokenIdsList()).addAllLogprobs(delta.getLogprobsList());
    for (ToolCallDelta call : delta.getToolCallsList()) {
      if (call.getIndex() == one.arguments.size()) {
        one.completion.addToolCalls(ToolCall.newBuilder().setId(call.getId()).setName(call.getName()));
        one.arguments.add(new StringBuilder());
      }
      one.arguments.get(call.getIndex()).append(call.getArguments());
    }
  }

  /** What the events so far make, by index. Until its end has come, a completion has no {@code finished}. */
  public List<Completion> completions() {
    List<Completion> completions = new ArrayList<>();
    for (Joined one : joined) {
      Completion.Builder completion =
          one.completion.clone()
              .setIndex(completions.size())
              .setText(one.text.toString())
              .setReasoning(one.reasoning.toString());
      for (int call = 0; call < one.arguments.size(); call++) {
        completion.getToolCallsBuilder(call).setArguments(one.arguments.get(call).toString());
      }
      completions.add(completion.build());
    }
    return completions;
  }
}
