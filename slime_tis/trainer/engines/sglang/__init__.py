"""What only SGLang servers have: requests and answers, and weights by broadcast."""
