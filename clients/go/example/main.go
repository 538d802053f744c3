// Command example streams the answer to a question: go run ./example "Why is the sky blue?"
//
// PACELINE_ADDRESS has the schedulers' addresses, with commas; default: 127.0.0.1:50051. PACELINE_TOKEN is sent
// if it is set. Ctrl-C cancels the request.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	paceline "github.com/paceline/paceline/clients/go"
	"github.com/paceline/paceline/clients/go/schedulerv1"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: example QUESTION")
		os.Exit(2)
	}
	if err := answer(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		var failure *paceline.Error
		if errors.As(err, &failure) && failure.Retryable() {
			fmt.Fprintln(os.Stderr, "try again in", failure.RetryAfter)
		}
		os.Exit(1)
	}
}

func answer(question string) error {
	addresses := os.Getenv("PACELINE_ADDRESS")
	if addresses == "" {
		addresses = "127.0.0.1:50051"
	}
	client, err := paceline.NewClient(
		strings.Split(addresses, ","), paceline.WithToken(os.Getenv("PACELINE_TOKEN")),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()

	stream := client.Generate(ctx, &schedulerv1.GenerateRequest{
		Prompt: paceline.Chat(paceline.User(question)),
		Stop:   &schedulerv1.StopConditions{MaxTokens: proto.Uint32(256)},
	})
	defer stream.Close()
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(event.GetDelta().GetText())
		if usage := event.GetFinished().GetUsage(); usage != nil {
			fmt.Printf("\n%d tokens in %d ms\n", usage.CompletionTokens, usage.TotalMs)
		}
	}
}
