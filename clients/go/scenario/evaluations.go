package main

import (
	"context"

	"google.golang.org/protobuf/encoding/protojson"

	paceline "github.com/paceline/paceline/clients/go"
	"github.com/paceline/paceline/clients/go/schedulerv1"
)

var evaluations = map[string]func(context.Context, *paceline.Client, []byte) (outcome, error){
	"score": score, "embed": embed, "rerank": rerank,
}

func score(ctx context.Context, client *paceline.Client, given []byte) (outcome, error) {
	request := &schedulerv1.ScoreRequest{}
	if err := protojson.Unmarshal(given, request); err != nil {
		return nil, err
	}
	reply, err := client.Score(ctx, request)
	scores := []outcome{}
	for _, one := range reply.GetScores() {
		scores = append(scores, outcome{"token_ids": one.TokenIds, "logprob": one.Logprob})
	}
	return outcome{"scores": scores}, err
}

func embed(ctx context.Context, client *paceline.Client, given []byte) (outcome, error) {
	request := &schedulerv1.EmbedRequest{}
	if err := protojson.Unmarshal(given, request); err != nil {
		return nil, err
	}
	reply, err := client.Embed(ctx, request)
	vectors := [][]float32{}
	for _, one := range reply.GetEmbeddings() {
		vectors = append(vectors, one.Values)
	}
	return outcome{"vectors": vectors}, err
}

func rerank(ctx context.Context, client *paceline.Client, given []byte) (outcome, error) {
	request := &schedulerv1.RerankRequest{}
	if err := protojson.Unmarshal(given, request); err != nil {
		return nil, err
	}
	reply, err := client.Rerank(ctx, request)
	results := []outcome{}
	for _, one := range reply.GetResults() {
		results = append(results, outcome{"index": one.Index, "score": one.Score})
	}
	return outcome{"results": results}, err
}
