package paceline

import (
	"io"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// Collector joins the events of a stream into completions.
type Collector struct {
	completions []*schedulerv1.Completion
}

// NewCollector is one that has seen no event.
func NewCollector() *Collector { return &Collector{} }

// Add takes the next event of the stream.
func (c *Collector) Add(event *schedulerv1.GenerateResponse) {
	for len(c.completions) <= int(event.Index) {
		c.completions = append(c.completions, &schedulerv1.Completion{Index: uint32(len(c.completions))})
	}
	one := c.completions[event.Index]
	if finished := event.GetFinished(); finished != nil {
		one.Finished = finished
		return
	}
	delta := event.GetDelta()
	one.TokenIds = append(one.TokenIds, delta.GetTokenIds()...)
	one.Text += delta.GetText()
	one.Logprobs = append(one.Logprobs, delta.GetLogprobs()...)
	one.Reasoning += delta.GetReasoning()
	for _, call := range delta.GetToolCalls() {
		if int(call.Index) == len(one.ToolCalls) {
			one.ToolCalls = append(one.ToolCalls, &schedulerv1.ToolCall{Id: call.Id, Name: call.Name})
		}
		one.ToolCalls[call.Index].Arguments += call.Arguments
	}
}

// Completions are what the events so far make, by index. Until its end has come, one has no Finished.
func (c *Collector) Completions() []*schedulerv1.Completion { return c.completions }

// Collect reads the rest of the stream; after an error the completions are what was received of it.
func (s *Stream) Collect() ([]*schedulerv1.Completion, error) {
	collector := NewCollector()
	for {
		event, err := s.Recv()
		if err == io.EOF {
			return collector.Completions(), nil
		}
		if err != nil {
			return collector.Completions(), err
		}
		collector.Add(event)
	}
}
