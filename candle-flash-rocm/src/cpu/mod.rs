//! Attention on the CPU: tiles of online softmax, spread over rayon's threads, in memory linear in the sequences.

mod backward;
mod call;
mod element;
mod forward;
mod product;
mod threads;

pub(crate) use backward::{gradient_of_queries, gradients, gradients_of_keys, row_sums, Inputs};
pub(crate) use call::{Call, Sequence};
pub(crate) use element::{Element, Strides, View};
pub(crate) use forward::forward;
pub(crate) use threads::start_threads;

/// The name of a thread's tiles in error messages.
const SCRATCH: &str = "scratch of the CPU kernels";
/// The name, in error messages, of the list of tasks and of the rows that each task writes.
const TASKS: &str = "the tasks of the CPU kernels";
