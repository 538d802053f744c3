package paceline

import "github.com/paceline/paceline/clients/go/schedulerv1"

// Chat is a conversation as the prompt of a request, formatted with the model's chat template.
func Chat(messages ...*schedulerv1.Message) *schedulerv1.GenerateRequest_Messages {
	return &schedulerv1.GenerateRequest_Messages{Messages: &schedulerv1.Messages{Messages: messages}}
}

// Text is a text as the prompt of a request, without a template.
func Text(text string) *schedulerv1.GenerateRequest_Text {
	return &schedulerv1.GenerateRequest_Text{Text: text}
}

// System is a turn of a chat that instructs the model.
func System(content string) *schedulerv1.Message {
	return &schedulerv1.Message{Role: "system", Content: content}
}

// User is the user's turn in a chat.
func User(content string) *schedulerv1.Message {
	return &schedulerv1.Message{Role: "user", Content: content}
}

// Assistant is the model's turn in a chat: an earlier answer, with the tool calls that it made.
func Assistant(answer *schedulerv1.Completion) *schedulerv1.Message {
	return &schedulerv1.Message{Role: "assistant", Content: answer.Text, ToolCalls: answer.ToolCalls}
}
