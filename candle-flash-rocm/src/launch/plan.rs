//! The parts of a launch plan: steps, arguments, and interfaces to kernels, memory and the device.

use super::signature::Values;
use super::{Argument, Choice, Planning, Signature};
use crate::error::{Error, Result};

/// One launch of a kernel of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel's name in the store.
    pub kernel: String,
    /// Blocks along each axis; the store knows the threads of a block.
    pub grid: [u32; 3],
    /// Its arguments, without the null pointers that a launch adds.
    pub arguments: Vec<Argument>,
}

impl Launch {
    /// A launch with the arguments of the kernel out of `values`.
    pub(super) fn filled(kernels: &dyn Catalogue, kernel: String, grid: [u32; 3], values: &Values) -> Result<Step> {
        let arguments = kernels.signature(&kernel)?.fill(&kernel, values)?;
        Ok(Step::Launch(Self { kernel, grid, arguments }))
    }

    /// The arguments' bytes end to end: 8 for an address, 4 for a number.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut found = Vec::new();
        for argument in &self.arguments {
            match argument {
                Argument::Pointer(address) => found.extend(address.to_le_bytes()),
                Argument::I32(number) => found.extend(number.to_le_bytes()),
                Argument::F32(number) => found.extend(number.to_le_bytes()),
                Argument::Structure(bytes) => found.extend(bytes),
            }
        }
        found
    }
}

/// Memory to fill with a pattern of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Device address, a multiple of 4.
    pub address: u64,
    /// The pattern: 0, or the bits of +inf.
    pub pattern: u32,
    /// How many times the pattern is written.
    pub count: usize,
}

/// A step of a plan; the steps of a plan run in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Fills memory.
    Fill(Fill),
    /// Launches a kernel.
    Launch(Launch),
}

/// What plans need to know of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of queries of a tile.
    pub block_m: usize,
    /// Keys of a tile.
    pub block_n: usize,
    /// Dies of the GPU to which programs go in turn.
    pub num_xcds: usize,
}

/// The kernels that can be launched: a store, or a stand-in in tests.
pub trait Catalogue {
    /// The tile of a kernel.
    ///
    /// # Errors
    ///
    /// If the kernel does not exist. The error says how to build it.
    fn tile(&self, kernel: &str) -> Result<Tile>;

    /// The names of a kernel's arguments.
    ///
    /// # Errors
    ///
    /// If the kernel does not exist, or takes a structure.
    fn signature(&self, kernel: &str) -> Result<&Signature>;

    /// Whether a kernel exists.
    fn has(&self, kernel: &str) -> bool;

    /// Which source of kernels serves a call.
    fn choice(&self) -> &Choice;

    /// The numbers by which launches are planned.
    fn planning(&self) -> &Planning;
}

/// Where plans get their workspaces.
pub trait Memory {
    /// Device address of so many bytes, a multiple of 16, that live until the plan has run.
    ///
    /// # Errors
    ///
    /// If the device has no such memory.
    fn allocate(&mut self, bytes: usize) -> Result<u64>;
}

/// What plans need to know of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Compute units, or multiprocessors.
    pub compute_units: usize,
}

/// A one-dimensional grid.
pub(super) fn line(blocks: usize) -> Result<[u32; 3]> {
    let blocks = i32::try_from(blocks).map_err(|_| {
        Error::Unsupported(format!("a grid of {blocks} blocks is beyond 32 bits: pass fewer rows at once"))
    })?;
    Ok([blocks as u32, 1, 1])
}

/// How many planes a kernel takes at once.
pub(super) fn chunk(planes: usize, even: bool, tile: &Tile, planning: &Planning) -> usize {
    planes.min(if even && tile.num_xcds == 1 { 1 } else { planning.grid.chunk })
}
