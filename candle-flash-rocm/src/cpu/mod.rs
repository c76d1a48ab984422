//! Attention on the CPU: tiles of online softmax, spread over rayon's threads, in memory linear in the sequences.

mod backward;
mod call;
mod element;
mod forward;
mod product;

pub(crate) use backward::{gradient_of_queries, gradients, gradients_of_keys, row_sums, Inputs};
pub(crate) use call::{Call, Sequence};
pub(crate) use element::{Element, Strides, View};
pub(crate) use forward::forward;
