package paceline

import (
	"context"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// Score is the logprobs of given texts, or of what follows prompts; nothing is generated. It is sent again when
// its scheduler dies, as Complete, Embed and Rerank are.
func (c *Client) Score(ctx context.Context, request *schedulerv1.ScoreRequest) (*schedulerv1.ScoreResponse, error) {
	request = copied(request)
	request.RequestId = idOr(request.RequestId)
	reply, err := call(ctx, c, c.failoverTimeout, schedulerv1.SchedulerServiceClient.Score, request)
	if err != nil {
		return nil, err
	}
	if len(reply.Scores) != len(request.Inputs) {
		return nil, incomplete("the reply has %d scores, not %d", len(reply.Scores), len(request.Inputs))
	}
	for index, one := range reply.Scores {
		if len(one.Logprobs) != len(one.TokenIds) {
			return nil, incomplete("score %d has %d logprobs of %d tokens", index, len(one.Logprobs), len(one.TokenIds))
		}
	}
	return reply, nil
}

// Embed is a vector for each text.
func (c *Client) Embed(ctx context.Context, request *schedulerv1.EmbedRequest) (*schedulerv1.EmbedResponse, error) {
	request = copied(request)
	request.RequestId = idOr(request.RequestId)
	reply, err := call(ctx, c, c.failoverTimeout, schedulerv1.SchedulerServiceClient.Embed, request)
	if err != nil {
		return nil, err
	}
	if len(reply.Embeddings) != len(request.Inputs) {
		return nil, incomplete("the reply has %d vectors, not %d", len(reply.Embeddings), len(request.Inputs))
	}
	for index, one := range reply.Embeddings {
		if len(one.Values) == 0 || len(one.Values) != len(reply.Embeddings[0].Values) {
			return nil, incomplete("vector %d has %d values", index, len(one.Values))
		}
	}
	return reply, nil
}

// Rerank orders documents by how well they answer a query, best first.
func (c *Client) Rerank(ctx context.Context, request *schedulerv1.RerankRequest) (*schedulerv1.RerankResponse, error) {
	request = copied(request)
	request.RequestId = idOr(request.RequestId)
	reply, err := call(ctx, c, c.failoverTimeout, schedulerv1.SchedulerServiceClient.Rerank, request)
	if err != nil {
		return nil, err
	}
	wanted := len(request.Documents)
	if request.TopN > 0 && int64(request.TopN) < int64(wanted) {
		wanted = int(request.TopN)
	}
	if len(reply.Results) != wanted {
		return nil, incomplete("the reply has %d results, not %d", len(reply.Results), wanted)
	}
	ranked := map[uint32]bool{}
	for _, one := range reply.Results {
		if ranked[one.Index] || int64(one.Index) >= int64(len(request.Documents)) {
			return nil, incomplete("the reply ranks document %d of %d, or twice", one.Index, len(request.Documents))
		}
		ranked[one.Index] = true
	}
	return reply, nil
}
