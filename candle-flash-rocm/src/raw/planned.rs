//! A call that is planned once and launched many times, each time with addresses of its own.

use std::sync::Arc;

use super::call::{check_addresses, of_call, Address, Call};
use super::run;
use super::scratch::Scratch;
use crate::driver::{Kernels, Stream};
use crate::error::{Error, Result};
use crate::launch::{Argument, Step};

/// Stand-ins for addresses: place `n` of a call is in the middle of `1 << PLACE_BITS` bytes. Two bases tell which words of
/// a plan are addresses: those that differ between two plans.
const BASES: [u64; 2] = [1 << 60, 1 << 61];
const PLACE_BITS: u32 = 44;
const MIDDLE: u64 = 1 << (PLACE_BITS - 1);

fn stand_in(base: u64, place: usize) -> u64 {
    base + ((place as u64) << PLACE_BITS) + MIDDLE
}

/// The place of the scratch memory; the addresses of a call follow.
const SCRATCH: usize = 0;

/// Where a plan has an address: a step, the argument (0 for a fill), the byte in a structure, and what belongs there.
#[derive(Debug)]
struct Relocation {
    step: usize,
    argument: usize,
    byte: usize,
    place: usize,
    offset: i64,
}

/// The launches of a call, for any addresses.
///
/// A plan keeps the kernels. It serves calls that differ from the one it was made for in addresses alone: the same sizes,
/// strides and options, and the same addresses that are 0.
#[derive(Debug)]
pub struct Plan {
    kernels: Arc<Kernels>,
    /// With stand-ins for addresses.
    call: Call,
    steps: Vec<Step>,
    relocations: Vec<Relocation>,
    scratch_bytes: usize,
}

/// A call with stand-ins for its addresses, and the addresses by their places. Equal starts of sequences stay equal,
/// because plans differ where each sequence has as many keys as queries.
fn with_stand_ins(call: &Call, base: u64) -> (Call, Vec<u64>) {
    let mut copy = *call;
    let mut addresses = vec![0];
    let mut starts_q = (0, 0);
    for (index, Address { name, field, .. }) in of_call(&mut copy).into_iter().enumerate() {
        let real = *field;
        addresses.push(real);
        if real == 0 {
            continue;
        }
        *field = if name == "cu_seqlens_k" && real == starts_q.0 { starts_q.1 } else { stand_in(base, index + 1) };
        if name == "cu_seqlens_q" {
            starts_q = (real, *field);
        }
    }
    (copy, addresses)
}

/// The words of a step that may be addresses: (argument, byte, value).
fn words(step: &Step) -> Vec<(usize, usize, u64)> {
    match step {
        Step::Fill(fill) => vec![(0, 0, fill.address)],
        Step::Launch(launch) => {
            let mut words = Vec::with_capacity(launch.arguments.len());
            for (index, argument) in launch.arguments.iter().enumerate() {
                match argument {
                    Argument::Pointer(address) => words.push((index, 0, *address)),
                    Argument::Structure(bytes) => {
                        words.extend(bytes.chunks_exact(8).enumerate().map(|(word, bytes)| {
                            (index, 8 * word, u64::from_le_bytes(bytes.try_into().unwrap_or([0; 8])))
                        }));
                    }
                    Argument::I32(_) | Argument::F32(_) => {}
                }
            }
            words
        }
    }
}

fn set(step: &mut Step, argument: usize, byte: usize, address: u64) {
    match step {
        Step::Fill(fill) => fill.address = address,
        Step::Launch(launch) => match &mut launch.arguments[argument] {
            Argument::Structure(bytes) => bytes[byte..byte + 8].copy_from_slice(&address.to_le_bytes()),
            other => *other = Argument::Pointer(address),
        },
    }
}

/// Where the plans of one call with stand-ins from both bases differ.
fn compare(steps: &[Step], others: &[Step]) -> Vec<Relocation> {
    let mut relocations = Vec::new();
    for (index, (step, other)) in steps.iter().zip(others).enumerate() {
        for ((argument, byte, word), (_, _, word_there)) in words(step).into_iter().zip(words(other)) {
            if word == word_there {
                continue;
            }
            let apart = word.wrapping_sub(BASES[0]);
            debug_assert_eq!(apart, word_there.wrapping_sub(BASES[1]), "an address of step {index}");
            let place = (apart >> PLACE_BITS) as usize;
            let offset = word.wrapping_sub(stand_in(BASES[0], place)) as i64;
            relocations.push(Relocation { step: index, argument, byte, place, offset });
        }
    }
    relocations
}

/// Steps with the addresses that belong to their places.
fn relocated(steps: &[Step], relocations: &[Relocation], addresses: &[u64]) -> Vec<Step> {
    let mut steps = steps.to_vec();
    for Relocation { step, argument, byte, place, offset } in relocations {
        set(&mut steps[*step], *argument, *byte, addresses[*place].wrapping_add_signed(*offset));
    }
    steps
}

/// The first field in which two calls differ, as (path, value, value). Both are without addresses.
fn difference(planned: &Call, call: &Call) -> Option<(String, String, String)> {
    let (planned, call) = (format!("{planned:#?}"), format!("{call:#?}"));
    let mut path: Vec<&str> = Vec::new();
    for (ours, theirs) in planned.lines().zip(call.lines()) {
        let depth = (ours.len() - ours.trim_start().len()) / 4;
        path.truncate(depth);
        let (name, value) = ours.trim().split_once(": ").unwrap_or(("", ours.trim()));
        if ours != theirs {
            let value_there = theirs.trim().split_once(": ").map_or(theirs.trim(), |(_, value)| value);
            let names: Vec<&str> = path.iter().copied().chain([name]).filter(|name| !name.is_empty()).collect();
            let clean = |value: &str| value.trim_end_matches(',').to_owned();
            return Some((names.join("."), clean(value), clean(value_there)));
        }
        path.push(name);
    }
    None
}

impl Plan {
    /// Plans a call. Its addresses count only by being 0 or not.
    ///
    /// # Errors
    ///
    /// As [`raw::forward`](super::forward) and [`raw::backward`](super::backward).
    pub fn new(kernels: Arc<Kernels>, call: &Call) -> Result<Self> {
        check_addresses(call)?;
        let [(first, _), (second, _)] = BASES.map(|base| with_stand_ins(call, base));
        let plan = |call: &Call, base| {
            let mut scratch = Scratch::imagined(stand_in(base, SCRATCH));
            call.plan(&kernels, &mut scratch).map(|steps| (steps, scratch.used()))
        };
        let (steps, scratch_bytes) = plan(&first, BASES[0])?;
        let (others, _) = plan(&second, BASES[1])?;
        let relocations = compare(&steps, &others);
        Ok(Self { kernels, call: first, steps, relocations, scratch_bytes })
    }

    /// Bytes of scratch memory that each launch needs.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// The kernels that the plan launches.
    #[must_use]
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// The steps for a call's addresses.
    ///
    /// # Errors
    ///
    /// If the call differs from the planned one in more than addresses, or an address is not aligned.
    fn steps(&self, call: &Call, scratch: &Scratch) -> Result<Vec<Step>> {
        check_addresses(call)?;
        let (stand_in, mut addresses) = with_stand_ins(call, BASES[0]);
        if stand_in != self.call {
            let (name, planned, other) = difference(&self.call, &stand_in).unwrap_or_default();
            let wanted = format!("{planned}, as planned: make a plan of its own for this call");
            return Err(Error::argument("plan", format!("{name} {other}"), format!("{name} {wanted}")));
        }
        scratch.holds(self.scratch_bytes)?;
        addresses[SCRATCH] = scratch.address();
        Ok(relocated(&self.steps, &self.relocations, &addresses))
    }

    /// Launches a call on a stream.
    ///
    /// # Safety
    ///
    /// As [`Call::launch`].
    ///
    /// # Errors
    ///
    /// If the call differs from the planned one in more than addresses, an address is not aligned, the scratch memory is
    /// too small, or the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, call: &Call, scratch: Scratch) -> Result<()> {
        let steps = self.steps(call, &scratch)?;
        // SAFETY: the caller's promise.
        unsafe { run(&self.kernels, stream, &steps) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{Fill, Launch};

    /// A plan whose addresses lie before, at and behind two places, in a pointer, in a structure and in a fill.
    fn plan(first: u64, second: u64) -> Vec<Step> {
        let mut structure = vec![7; 8];
        structure.extend((first + 4096).to_le_bytes());
        structure.extend(3u64.to_le_bytes());
        structure.extend((second - 256).to_le_bytes());
        structure.extend([1, 2, 3]);
        let arguments = vec![
            Argument::Pointer(second),
            Argument::Pointer(0),
            Argument::I32(5),
            Argument::Structure(structure),
            Argument::F32(0.5),
        ];
        vec![
            Step::Fill(Fill { address: first, pattern: 0, count: 4 }),
            Step::Launch(Launch { kernel: "fwd".into(), grid: [1, 2, 3], arguments }),
        ]
    }

    #[test]
    fn addresses_move_and_numbers_stay() {
        let [steps, others] = BASES.map(|base| plan(stand_in(base, 0), stand_in(base, 2)));
        let relocations = compare(&steps, &others);
        assert_eq!(relocations.len(), 4, "{relocations:?}");
        for (first, second) in [(1 << 20, 1 << 30), (1 << 47, 1 << 12)] {
            assert_eq!(relocated(&steps, &relocations, &[first, 0, second]), plan(first, second));
        }
    }
}
