//! A call of attention as values: shapes, device addresses and strides, for [`crate::raw`].
//!
//! From a call, what the store says of its kernels, and the GPU's compute units, a plan is computed: which kernels to
//! launch, with which grids and arguments. It is what the wheels' Python backends launch, byte for byte. The plan's types
//! are private.

mod append;
mod argument;
mod assembly;
mod backward;
mod call;
mod choice;
mod composable;
mod dtype;
mod forward;
mod fp8;
mod int8;
mod mask;
mod options;
mod plan;
mod planning;
mod refuse;
mod shape;
mod signature;
mod sources;
mod split_kv;
mod sums;
mod tensor;
mod tile_lists;

pub use append::{Append, Rotary};
pub use call::{Backward, Forward};
pub use dtype::Dtype;
pub use mask::Mask;
pub use options::{Bias, Compute, Options};
pub use plan::Memory;
pub use shape::Shape;
pub use tensor::{Operand, Pages};

pub(crate) use append::plan_append;
pub(crate) use argument::Argument;
pub(crate) use backward::plan_backward;
pub(crate) use choice::{Choice, Source};
pub(crate) use composable::{plan_backward_ck, plan_forward_ck, Call, Planner};
pub(crate) use forward::plan_forward;
pub(crate) use plan::{Catalogue, Device, Fill, Launch, Step, Tile};
pub(crate) use planning::Planning;
pub(crate) use signature::Signature;
pub(crate) use sources::Sources;

/// For this crate's own tests and examples. Any release may change or remove what is here.
#[doc(hidden)]
pub mod internals {
    pub use super::append::plan_append;
    pub use super::argument::Argument;
    pub use super::backward::plan_backward;
    pub use super::choice::{Choice, Source};
    pub use super::composable::{plan_backward_ck, plan_forward_ck, Call, Planner};
    pub use super::forward::plan_forward;
    pub use super::plan::{Catalogue, Device, Fill, Launch, Step, Tile};
    pub use super::planning::Planning;
    pub use super::signature::{Name, Signature};
    pub use super::sources::Sources;
}
