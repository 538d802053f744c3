// Command scenario runs the steps that tests/scenario gives to all clients: JSON lines in, outcomes out.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	paceline "github.com/paceline/paceline/clients/go"
	"github.com/paceline/paceline/clients/go/schedulerv1"
)

type step struct {
	Call              string
	Addresses         []string
	CA                string
	Token             string
	FailoverTimeoutMs *int            `json:"failover_timeout_ms"`
	TimeoutMs         int             `json:"timeout_ms"`
	AffinityKey       string          `json:"affinity_key"`
	Request           json.RawMessage `json:"request"`
	Text              string
	TokenIDs          []uint32 `json:"token_ids"`
	LeaveAfterTokens  int      `json:"leave_after_tokens"`
	AbortAfterTokens  int      `json:"abort_after_tokens"`
	ReportAfterTokens int      `json:"report_after_tokens"`
	Parallel          int
}

type outcome map[string]interface{}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var next step
		if err := json.Unmarshal(lines.Bytes(), &next); err != nil {
			log.Fatal(err)
		}
		found, err := next.run()
		var failure *paceline.Error
		if errors.As(err, &failure) {
			found = outcome{"error": describe(failure)}
		} else if err != nil {
			log.Fatal(err)
		}
		write(found)
	}
}

func (s *step) run() (outcome, error) {
	client, err := s.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx := paceline.WithAffinityKey(context.Background(), s.AffinityKey)
	if s.TimeoutMs > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(s.TimeoutMs)*time.Millisecond)
		defer cancel()
	}
	switch s.Call {
	case "model_info":
		info, err := client.ModelInfo(ctx)
		return outcome{"name": info.GetName(), "has_chat_template": info.GetHasChatTemplate()}, err
	case "tokenize":
		input := &schedulerv1.TokenizeRequest_Text{Text: s.Text}
		ids, err := client.Tokenize(ctx, &schedulerv1.TokenizeRequest{Input: input})
		return outcome{"token_ids": ids}, err
	case "detokenize":
		text, err := client.Detokenize(ctx, s.TokenIDs)
		return outcome{"text": text}, err
	}
	if run, found := evaluations[s.Call]; found {
		return run(ctx, client, s.Request)
	}
	request := &schedulerv1.GenerateRequest{}
	if err := protojson.Unmarshal(s.Request, request); err != nil {
		return nil, err
	}
	switch s.Call {
	case "complete":
		found, err := client.Complete(ctx, request)
		return outcome{"completions": completions(found)}, err
	case "generate":
		if s.Parallel > 0 {
			return s.parallel(ctx, client, request)
		}
		return s.generate(ctx, client, request)
	}
	return nil, fmt.Errorf("unknown call %s", s.Call)
}

func (s *step) client() (*paceline.Client, error) {
	var options []paceline.Option
	if s.Token != "" {
		options = append(options, paceline.WithToken(s.Token))
	}
	if s.CA != "" {
		pem, err := os.ReadFile(s.CA)
		if err != nil {
			return nil, err
		}
		authorities := x509.NewCertPool()
		authorities.AppendCertsFromPEM(pem)
		options = append(options, paceline.WithTLS(&tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}))
	}
	if s.FailoverTimeoutMs != nil {
		timeout := time.Duration(*s.FailoverTimeoutMs) * time.Millisecond
		options = append(options, paceline.WithFailoverTimeout(timeout))
	}
	return paceline.NewClient(s.Addresses, options...)
}

// parallel is as many streams at once; only the first one reports.
func (s *step) parallel(
	ctx context.Context, client *paceline.Client, request *schedulerv1.GenerateRequest,
) (outcome, error) {
	other := *s
	other.ReportAfterTokens = 0
	found, failures := make([]outcome, s.Parallel), make([]error, s.Parallel)
	var streams sync.WaitGroup
	for i := range found {
		streams.Add(1)
		go func(i int) {
			defer streams.Done()
			if i == 0 {
				found[i], failures[i] = s.generate(ctx, client, request)
			} else {
				found[i], failures[i] = other.generate(ctx, client, request)
			}
		}(i)
	}
	streams.Wait()
	different := 0
	for i, one := range found {
		if failures[i] != nil {
			return nil, failures[i]
		}
		if !reflect.DeepEqual(one, found[0]) {
			different++
		}
	}
	found[0]["different"] = different
	return found[0], nil
}

func (s *step) generate(
	ctx context.Context, client *paceline.Client, request *schedulerv1.GenerateRequest,
) (outcome, error) {
	stream := client.Generate(ctx, request)
	defer stream.Close()
	found := paceline.NewCollector()
	before := 0
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			logprobs := []float64{}
			for _, one := range stream.PromptLogprobs() {
				logprobs = append(logprobs, float64(one.Logprob))
			}
			return outcome{"completions": completions(found.Completions()), "prompt_logprobs": logprobs}, nil
		}
		if err != nil {
			return nil, err
		}
		found.Add(event)
		tokens := before + len(event.GetDelta().GetTokenIds())
		reached := func(mark int) bool { return before < mark && mark <= tokens }
		if reached(s.LeaveAfterTokens) {
			return outcome{"left": true}, nil
		}
		if reached(s.AbortAfterTokens) {
			if _, err := client.Abort(ctx, stream.RequestID()); err != nil {
				return nil, err
			}
		}
		if reached(s.ReportAfterTokens) {
			write(outcome{"received": tokens})
		}
		before = tokens
	}
}

func completions(found []*schedulerv1.Completion) []outcome {
	described := []outcome{}
	for _, one := range found {
		finished := one.Finished
		described = append(described, outcome{
			"text": one.Text, "token_ids": one.TokenIds,
			"reason":            strings.ToLower(strings.TrimPrefix(finished.Reason.String(), "FINISH_REASON_")),
			"stop_string":       finished.GetStopString(),
			"prompt_tokens":     finished.GetUsage().GetPromptTokens(),
			"completion_tokens": finished.GetUsage().GetCompletionTokens(),
		})
	}
	return described
}

func describe(failure *paceline.Error) outcome {
	described := outcome{
		"code": upperSnake(failure.Code.String()), "reason": failure.Reason, "message": failure.Message,
		"retryable": failure.Retryable(), "retry_after_ms": nil, "lost": failure.Lost,
	}
	if failure.RetryAfter > 0 {
		described["retry_after_ms"] = failure.RetryAfter.Seconds() * 1000
	}
	return described
}

var wordEnd = regexp.MustCompile("([a-z])([A-Z])")

// upperSnake is INVALID_ARGUMENT for InvalidArgument, which gRPC for Go writes.
func upperSnake(code string) string {
	return strings.ToUpper(wordEnd.ReplaceAllString(code, "${1}_${2}"))
}

func write(found outcome) {
	line, err := json.Marshal(found)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", line)
}
